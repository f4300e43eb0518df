"""Tensors between pipeline stages: receive buffers, stage outputs, and the gradient that is being sent.

torch allocates one receive buffer per microbatch when the first step starts, for activations and for gradients, and keeps them for the
whole run. A stage keeps its output until the microbatch's backward has ended.

Source: torch/distributed/pipelining/stage.py (`_prepare_forward_infra`, `fwd_cache`).
"""

from __future__ import annotations

from megaplan.blocks.dims import Dims


def boundary_bytes(dims: Dims) -> int:
    """One microbatch's residual stream on a rank."""
    batch, tokens, hidden = dims.residual
    return batch * tokens * hidden * dims.dtype.bytes
