"""Specs from other projects' model configs. Nothing is guessed: anything missing, and anything that a spec cannot express, is an error."""
