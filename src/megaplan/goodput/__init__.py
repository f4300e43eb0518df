"""A whole run: goodput under interruptions, checkpoints, days, cost and energy."""
