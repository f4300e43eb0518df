"""The arguments of indexed attention."""

from typing import NamedTuple

from torch import Tensor

from megakernels.ops.indexed_attention.reference import Indexed


class Arguments(NamedTuple):
    """The arguments of the torch op, as `indexed_attention` documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor
    index_weights: Tensor
    k_scale: Tensor
    k_bias: Tensor
    cos: Tensor
    sin: Tensor
    starts: Tensor | None
    scale: float
    top_k: int
    loss_factor: float
    eps: float
    window: int | None
    sinks: Tensor | None = None

    def with_keys(self, keys: Tensor) -> Indexed:
        """The arguments with index keys after their norm and rotation, fp32 [B, T, D]."""
        return Indexed(keys=keys, **{name: getattr(self, name) for name in Indexed._fields if name not in ("keys", "first")})
