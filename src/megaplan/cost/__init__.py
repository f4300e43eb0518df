"""Cost: FLOPs and bytes moved, forward and backward, per token and layer. One source for cutting, utilisation and rooflines."""
