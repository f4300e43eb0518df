"""Causal attention with shared key heads and an optional window. Saved: q, k, v, starts, out, lse."""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, join, only_needed, require, require_starts
from megakernels.ops.attention import reference

__all__ = ["attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, starts: Tensor | None = None) -> Tensor:
    """Causal softmax attention; query head i reads key head i // (Hq / Hkv).

    Args:
        q: [B, T, Hq, D].
        k: [B, T, Hkv, D], Hkv divides Hq.
        v: [B, T, Hkv, Dv].
        scale: factor on the scores.
        window: position i sees j with i − window < j ≤ i; None sees all j ≤ i.
        starts: int32 [B, T] or None: index of the first position of each position's document, for rows that hold several documents;
            None is one document a row. Position i sees none before it. No gradient.

    Returns:
        [B, T, Hq, Dv], contiguous, in q's dtype.

    Raises:
        ValueError: shapes do not fit, or window < 1.

    Source: arXiv:2307.08691; arXiv:2305.13245 for shared key heads.
    """
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    require(fits, "attention", "q must be [B,T,Hq,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv]", q=q.shape, k=k.shape, v=v.shape)
    require(q.shape[2] % k.shape[2] == 0, "attention", "Hkv must divide Hq", Hq=q.shape[2], Hkv=k.shape[2])
    require(window is None or window >= 1, "attention", "window must be at least 1", window=window)
    require_starts("attention", starts, q.shape[:2])
    out: Tensor = _attention(q, k, v, starts, scale, window)[0]
    return out


@custom_op("megakernels::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    return reference.forward(q, k, v, starts, scale, window)


@custom_op("megakernels::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    needs: list[bool],
) -> list[Tensor]:
    return only_needed(reference.backward(grad_out, q, k, v, starts, out, lse, scale, window, needs))


@_attention.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, num_positions, num_heads, _width = q.shape
    lse = q.new_empty((batch, num_heads, num_positions), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, num_positions, num_heads, v.shape[-1])), lse


join(_attention, _attention_backward, outputs=("out", "lse"), gradients=("q", "k", "v"))
