"""Specs from Megatron-LM's launch arguments."""
