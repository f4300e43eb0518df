"""One rank's training state: its stages, built, sharded and initialised, its optimizers, and one optimizer step."""
