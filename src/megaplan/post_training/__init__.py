"""Post-training: memory by phase, time of an iteration, and placements of a policy with its inference engine."""
