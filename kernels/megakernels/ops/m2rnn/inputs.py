"""The recurrence's arguments."""

from typing import NamedTuple

from torch import Tensor


class M2rnnInputs(NamedTuple):
    """The arguments of the torch op, as `m2rnn` documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    state_map: Tensor
    D: Tensor
    dt_bias: Tensor
    A_log: Tensor
    starts: Tensor | None
    save_every: int


GRADIENTS = ("q", "k", "v", "f", "state_map", "D", "dt_bias", "A_log")
ACCUMULATED = ("q", "k", "state_map", "D", "dt_bias", "A_log")
"""Arguments whose gradients are sums over heads or positions: q and k, which all heads share, and the parameters."""
