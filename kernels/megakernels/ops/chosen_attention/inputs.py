"""The arguments of attention to chosen keys."""

from typing import NamedTuple

from torch import Tensor

from megakernels.ops.attention.inputs import Attention


class Chosen(NamedTuple):
    """The arguments of the torch op, as `chosen_attention` documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    choice: Tensor
    starts: Tensor | None
    scale: float
    window: int | None
    sinks: Tensor | None = None

    @property
    def attended(self) -> Attention:
        """The attention to all keys that are visible."""
        return Attention(self.q, self.k, self.v, self.starts, self.scale, self.window, self.sinks)
