"""Hyper-connections: how a block reads several residual streams and adds to them."""
