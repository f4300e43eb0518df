"""Parallelism: `groups` are the process groups and collectives that models call, `apply` changes whole stages from outside."""
