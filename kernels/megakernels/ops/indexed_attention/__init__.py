"""Causal attention to the keys that an indexer scores highest, and the indexer's own training.

Saved: q, k, v, the indexer's inputs, cos, sin, starts, out, lse, and each query's threshold and log-sum-exp of index scores.
"""

from typing import Any, NamedTuple

from torch import Tensor

from megakernels._common import operation, require, require_starts, types_of
from megakernels.ops.indexed_attention import reference
from megakernels.ops.indexed_attention.reference import Indexed

__all__ = ["indexed_attention"]


def indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    k_scale: Tensor,
    k_bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    top_k: int,
    loss_factor: float,
    eps: float,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query to the `top_k` visible keys of largest index score, of equal scores to those that come first.

    The score of key s for query t is Σ_i w_{t,i} relu(a_{t,i} · b_s) / √(I D): a the rotated index queries, b the rotated layer norm of
    index keys. The choice itself has no gradient. Instead the backward gives the indexer's inputs the gradient of

        loss_factor · Σ_t Σ_h KL(p_{t,h} ‖ softmax of the scores of t's chosen keys),

    p_{t,h} being head h's attention, a constant; whatever the gradient of the output is. And q, k and v get none of that loss.

    Args:
        q: [B, T, H, E].
        k: [B, T, H, E].
        v: [B, T, H, V].
        index_q: [B, T, I, D].
        index_k: [B, T, D], before its norm; one key for all index heads.
        index_weights: [B, T, I], w.
        k_scale: [D], of the layer norm.
        k_bias: [D].
        cos: fp32 [T, R/2] with R ≤ D: angles of the first R dims of a and b; no gradient.
        sin: fp32 [T, R/2]; no gradient.
        scale: Factor on the attention scores.
        top_k: Keys that a query attends to; all where it sees no more.
        loss_factor: Of the indexer's loss: coefficient / (tokens of the batch · heads of all ranks).
        eps: Of the layer norm.
        window: Position i sees j with i − window < j ≤ i; None sees all j ≤ i.
        starts: int32 [B, T] or None: index of the first position of each position's document; none before it is visible. No gradient.

    Returns:
        [B, T, H, V], contiguous, in q's dtype.

    Saves:
        out: what is returned.
        lse: fp32 [B, H, T].
        thresholds: fp32 [B, T], each query's top_k-th largest index score.
        index_lse: fp32 [B, T], log-sum-exp of the index scores of its chosen keys.

    Raises:
        ValueError: Shapes do not fit, top_k < 1 or window < 1.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1: equations 1 and 2, and the loss of its sparse training stage.
    """
    fits = q.dim() == 4 and q.shape == k.shape and v.shape[:3] == q.shape[:3]
    require(fits, "indexed_attention", "q and k must be [B,T,H,E], v [B,T,H,V]", q=q.shape, k=k.shape, v=v.shape)
    fits = index_q.dim() == 4 and index_q.shape[:2] == q.shape[:2] and index_k.shape == (*q.shape[:2], index_q.shape[3])
    fits = fits and index_weights.shape == index_q.shape[:3] and k_scale.shape == k_bias.shape == index_q.shape[3:]
    shapes = {"index_q": index_q.shape, "index_k": index_k.shape, "index_weights": index_weights.shape, "k_scale": k_scale.shape}
    require(
        fits, "indexed_attention", "index_q must be [B,T,I,D], index_k [B,T,D], index_weights [B,T,I], k_scale and k_bias [D]", **shapes
    )
    fits = cos.shape == sin.shape and cos.dim() == 2 and cos.shape[0] == q.shape[1] and 2 * cos.shape[1] <= index_q.shape[3]
    width = index_q.shape[3]
    require(fits, "indexed_attention", "cos and sin must be [T, R/2] with R at most D", T=q.shape[1], D=width, cos=cos.shape, sin=sin.shape)
    require(top_k >= 1, "indexed_attention", "top_k must be at least 1", top_k=top_k)
    require(window is None or window >= 1, "indexed_attention", "window must be at least 1", window=window)
    require_starts("indexed_attention", starts, q.shape[:2])
    tensors = (q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin, starts)
    out: Tensor = _indexed_attention(*tensors, scale, top_k, loss_factor, eps, window)[0]
    return out


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

    def with_keys(self) -> Indexed:
        """With index keys after their norm and rotation."""
        keys = reference.make_keys(self.index_k, self.k_scale, self.k_bias, self.cos, self.sin, self.eps)
        return Indexed(keys=keys, **{name: getattr(self, name) for name in Indexed._fields if name not in ("keys", "first")})


def _backward(grad_out: Tensor, given: Arguments, *made: Any) -> tuple[Tensor, ...]:
    *saved, _needs = made
    *heads, grad_keys, grad_weights = reference.backward(grad_out, given.with_keys(), *saved)
    grad_k, *norm = reference.make_keys_backward(grad_keys, given.index_k, given.k_scale, given.cos, given.sin, given.eps)
    return (*heads, grad_k, grad_weights, *norm)


_indexed_attention, _ = operation(
    "indexed_attention",
    types_of(Arguments),
    Arguments,
    outputs=("out", "lse", "thresholds", "index_lse"),
    saved=("out", "lse", "thresholds", "index_lse"),
    gradients=("q", "k", "v", "index_q", "index_k", "index_weights", "k_scale", "k_bias"),
    forward=lambda given: reference.forward(given.with_keys()),
    backward=_backward,
    fake=lambda given: reference.made_like(given.q, given.v),
)
