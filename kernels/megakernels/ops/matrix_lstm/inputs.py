"""The operation's arguments."""

from typing import NamedTuple

from torch import Tensor


class MatrixLstmInputs(NamedTuple):
    """The arguments of the torch op, as `mlstm` documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    input_gate: Tensor
    forget_gate: Tensor
    starts: Tensor | None
    chunk_size: int
    soft_cap: float


GRADIENTS = ("q", "k", "v", "input_gate", "forget_gate")
