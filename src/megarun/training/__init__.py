"""The training loop, input checks, agreement of all ranks, bad steps and evaluation."""
