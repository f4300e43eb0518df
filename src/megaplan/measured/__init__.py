"""Measured constants of megarun's kernels, one file for each device on which steps were profiled, with the measurement."""
