"""Hyper-connections: what a block reads of several residual streams, and what it adds to them."""
