"""One rank's training state: its stages built, filled and sharded, its optimizers, and one optimizer step."""
