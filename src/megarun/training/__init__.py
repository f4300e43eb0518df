"""The training loop and what surrounds a step: input checks, agreement of all ranks, bad steps and evaluation."""
