"""Specs from other projects' model configs. Nothing is guessed: what a config does not say, or a spec cannot say, is an error."""
