"""Examines a machine for training, and what a plan needs of it."""
