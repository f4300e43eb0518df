"""Measured constants of megarun's kernels, with their measurement: one file for each device on which steps were profiled."""
