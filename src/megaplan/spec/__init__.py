"""Spec: what the user writes, validated, with diagnostics that point into the file."""
