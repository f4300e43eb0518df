"""Optimizers: Muon for matrices, AdamW for the rest, the gradient norm that spans stages and shards, the learning rate."""
