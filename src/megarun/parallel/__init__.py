"""Parallelism applied to plain stages from outside: processes and mesh, FSDP2, pipeline schedule, gradients shared across stages."""
