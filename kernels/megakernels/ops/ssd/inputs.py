"""The scan's arguments."""

from typing import NamedTuple

from torch import Tensor


class SsdInputs(NamedTuple):
    """The arguments of the torch op, as `ssd` documents them."""

    x: Tensor
    dt: Tensor
    A_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    starts: Tensor | None
    chunk_size: int
    dt_min: float
    dt_max: float


GRADIENTS = ("x", "dt", "A_log", "B", "C", "D", "dt_bias")
ACCUMULATED = ("A_log", "D", "dt_bias")
