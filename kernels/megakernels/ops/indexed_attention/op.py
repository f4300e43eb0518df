"""Causal attention to the keys that an indexer scores highest, and the indexer's own training.

Saved: q, k, v, the indexer's inputs, cos, sin, starts, out, lse, and each query's threshold and log-sum-exp of index scores.
"""

from functools import partial
from typing import Any

from torch import Tensor

from megakernels._common import operation, require, require_starts, types_of
from megakernels.ops.attention.sinks import require_sinks
from megakernels.ops.indexed_attention import choice
from megakernels.ops.indexed_attention.bits import choice_like
from megakernels.ops.indexed_attention.inputs import Arguments
from megakernels.ops.indexed_attention.reference import made_like

__all__ = ["indexed_attention", "indexed_attention_choice"]


def indexed_attention(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, index_weights: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor,
    sin: Tensor,
    *, scale: float, top_k: int, loss_factor: float, eps: float, window: int | None = None,
    starts: Tensor | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of every query to the `top_k` visible keys of largest index score, of equal scores the first ones.

    The score of key s for query t is Σ_i w_{t,i} relu(a_{t,i} · b_s) / √(I D): a the rotated index queries, b the rotated layer norm of
    index keys. The choice itself has no gradient. Instead the backward gives the indexer's inputs the gradient of

        loss_factor · Σ_t Σ_h KL(p_{t,h} ‖ softmax of the scores of t's chosen keys),

    p_{t,h} being head h's attention to keys, a constant whose sum is 1 minus the sink's share; independent of the output's gradient. And q,
    k, v and sinks get no gradient from that loss.

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
        top_k: Keys that a query attends to; all if fewer are visible.
        loss_factor: Factor of the indexer's loss: coefficient / (tokens of the batch · heads of all ranks).
        eps: Epsilon of the layer norm.
        window: Position i sees j with i − window < j ≤ i; None sees all j ≤ i.
        starts: int32 [B, T] or None: index of the first position of each position's document; none before it is visible. No gradient.
        sinks: [H] or None, as for `attention`.

    Returns:
        [B, T, H, V], contiguous, in q's dtype.

    Saves:
        out: the output.
        lse: fp32 [B, H, T].
        thresholds: fp32 [B, T], each query's top_k-th largest index score.
        index_lse: fp32 [B, T], log-sum-exp of the index scores of its chosen keys.

    Scratch:
        Both ways the index keys and the rotated index queries in fp32, index scores of a chunk of queries, fp32 [B, rows, T] with at most
        2^25 elements or 64 rows, and a bit per query and key; T rounded up to 128. Backward a second array like the scores, the gradient
        of the keys in fp32, and δ, fp32 [B, H, T], when the scores are freed; with sinks one such array forward and two backward.

    Triton:
        Forward per chunk of queries index scores and a selection, then the attention kernel with the chosen keys as a mask. Backward per
        chunk the scores and the selection again, the sum of attention over heads, the gradient of the scores, and two kernels for the
        gradients of index keys and of index queries and weights; then the two kernels of attention's backward. Index scores are fp32 by
        three TF32 products. Bitwise reproducible. Sizes that `attention` leaves to plain torch, and index heads wider than 128, stay with
        plain torch.

    Raises:
        ValueError: Shapes do not fit, top_k < 1 or window < 1.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1: equations 1 and 2, and the loss of its sparse training stage.
    """
    numbers = scale, top_k, loss_factor, eps, window
    given = Arguments(q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin, starts, *numbers, sinks)
    _require(given)
    out: Tensor = _indexed_attention(*given)[0]
    return out


def indexed_attention_choice(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, index_weights: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor,
    sin: Tensor,
    *, scale: float, top_k: int, loss_factor: float, eps: float, window: int | None = None,
    starts: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`indexed_attention`, whose arguments it takes, with its choice, for other layers that attend to the same keys (`chosen_attention`).

    Returns:
        out, and int32 [B, T, ⌈T / 128⌉ · 4]: bit s % 32 of word s // 32 for each key s that a query attends to. The choice has no gradient.

    Saves:
        out: the output.
        lse: fp32 [B, H, T].
        thresholds: fp32 [B, T], each query's top_k-th largest index score.
        index_lse: fp32 [B, T], log-sum-exp of the index scores of its chosen keys.

    Scratch:
        As `indexed_attention`; forward the bits are a result.

    Triton:
        The kernels of `indexed_attention`.

    Raises:
        ValueError: Shapes do not fit, top_k < 1 or window < 1.

    Source: arXiv:2603.12201.
    """
    numbers = scale, top_k, loss_factor, eps, window
    given = Arguments(q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin, starts, *numbers, sinks)
    _require(given)
    made = _indexed_attention_choice(*given)
    return made[0], made[4]


def _require(given: Arguments) -> None:
    _require_shapes(given)
    require(given.top_k >= 1, "indexed_attention", "top_k must be at least 1", top_k=given.top_k)
    require(given.window is None or given.window >= 1, "indexed_attention", "window must be at least 1", window=given.window)
    require_starts("indexed_attention", given.starts, given.q.shape[:2])
    require_sinks("indexed_attention", given.sinks, given.q)


def _require_shapes(given: Arguments) -> None:
    """Check that the shapes of q, k and v, of the indexer's inputs, and of cos and sin fit each other."""
    q, k, v, index_q, index_k, index_weights, k_scale, k_bias, cos, sin = given[:10]
    fits = q.dim() == 4 and q.shape == k.shape and v.shape[:3] == q.shape[:3]
    require(fits, "indexed_attention", "q and k must be [B,T,H,E], v [B,T,H,V]", q=q.shape, k=k.shape, v=v.shape)
    fits = index_q.dim() == 4 and index_q.shape[:2] == q.shape[:2] and index_k.shape == (*q.shape[:2], index_q.shape[3])
    fits = fits and index_weights.shape == index_q.shape[:3] and k_scale.shape == k_bias.shape == index_q.shape[3:]
    shapes = {"index_q": index_q.shape, "index_k": index_k.shape, "index_weights": index_weights.shape, "k_scale": k_scale.shape}
    wanted = "index_q must be [B,T,I,D], index_k [B,T,D], index_weights [B,T,I], k_scale and k_bias [D]"
    require(fits, "indexed_attention", wanted, **shapes)
    fits = cos.shape == sin.shape and cos.dim() == 2 and cos.shape[0] == q.shape[1] and 2 * cos.shape[1] <= index_q.shape[3]
    sizes = {"T": q.shape[1], "D": index_q.shape[3], "cos": cos.shape, "sin": sin.shape}
    require(fits, "indexed_attention", "cos and sin must be [T, R/2] with R at most D", **sizes)


def _registered(name: str, *, returns_choice: bool) -> Any:
    """The torch ops of this name, forward and backward; `returns_choice`: true if the choice is a result."""
    saved = ("out", "lse", "thresholds", "index_lse")
    return operation(
        name,
        types_of(Arguments),
        Arguments,
        outputs=(*saved, "choice") if returns_choice else saved,
        saved=saved,
        gradients=("q", "k", "v", "index_q", "index_k", "index_weights", "k_scale", "k_bias", "sinks"),
        forward=choice.forward_with_choice if returns_choice else choice.forward,
        backward=choice.backward,
        fake=_fake_with_choice if returns_choice else lambda given: made_like(given.q, given.v),
        forward_scratch=partial(choice.forward_scratch, returns_choice=returns_choice),
        backward_scratch=choice.backward_scratch,
        forward_cost=choice.cost_of_forward,
        backward_cost=choice.cost_of_backward,
    )


def _fake_with_choice(given: Arguments) -> tuple[Tensor, ...]:
    return *made_like(given.q, given.v), choice_like(given.q, given.q.shape[1])


_indexed_attention, _indexed_attention_backward = _registered("indexed_attention", returns_choice=False)
_indexed_attention_choice, _ = _registered("indexed_attention_choice", returns_choice=True)
