"""Examines a machine for training, and for a plan's requirements."""
