"""Cost: FLOPs and bytes moved, forward and backward, per token and layer. It is the single source for cuts, utilisation and rooflines."""
