"""What a machine has and lacks for training, and what a plan needs of it."""
