"""The delta rule's arguments."""

from typing import NamedTuple

from torch import Tensor


class GatedDeltaInputs(NamedTuple):
    """The arguments of the torch op, as `gated_delta` documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    starts: Tensor | None
    chunk_size: int
    save_every: int
    beta_limit: float


GRADIENTS = ("q", "k", "v", "decay", "beta", "A_log", "dt_bias")
ACCUMULATED = ("A_log", "dt_bias")
"""Arguments whose gradients are sums over positions."""
