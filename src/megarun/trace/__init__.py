"""The runtime's own bytes per rank, on fake tensors, without a GPU: every live storage with its owner, phase by phase."""
