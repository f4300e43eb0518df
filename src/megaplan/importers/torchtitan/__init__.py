"""torchtitan's job configurations as specs."""
