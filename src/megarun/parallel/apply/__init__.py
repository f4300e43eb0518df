"""Transforms of a built stage, in this order: recompute, torch.compile, FSDP2, the pipeline schedule."""
