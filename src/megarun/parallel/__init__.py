"""Parallelism: `groups` has the process groups and collectives that models call, `apply` transforms built stages from outside."""
