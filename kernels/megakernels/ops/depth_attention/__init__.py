"""Attention over depth: a block's input as a weighted sum of earlier blocks' results, token by token."""
