"""Attention over depth: what a block reads of the results of earlier blocks, token by token."""
