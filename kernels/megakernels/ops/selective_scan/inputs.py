"""The selective scan's arguments."""

from typing import NamedTuple

from torch import Tensor


class SelectiveScanInputs(NamedTuple):
    """The arguments of the torch op, as `selective_scan` documents them."""

    x: Tensor
    dt: Tensor
    A_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    starts: Tensor | None
    save_every: int


GRADIENTS = ("x", "dt", "A_log", "B", "C", "D", "dt_bias")
ACCUMULATED = ("A_log", "B", "C", "D", "dt_bias")
"""Arguments whose gradients are sums over positions, or over the channels of several pieces."""
