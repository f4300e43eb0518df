"""Traces the runtime's memory per rank, on fake tensors, without a GPU: every live storage with its owner, by phase."""
