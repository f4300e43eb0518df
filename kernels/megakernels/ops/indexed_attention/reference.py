"""Attention to indexed keys in plain torch, a block of queries at a time, with explicit backward formulas.

With I the index scores, S_t the top_k visible keys of largest score, of equal ones those that come first, and s = scale · q kᵀ:
out = Σ_{S_t} p v with p = exp(s − lse), and c = exp(I − index_lse) the softmax of scores over S_t. The backward recomputes both from what
is saved, each query's threshold, the top_k-th largest score, among it: a key above it is chosen, and of those equal to it as many as are
wanted. Index scores are recomputed in the same way, so that comparisons have the same results.

Queries may be a piece of a sequence: they come from position `first` on, and keys are all of the sequence up to the piece's end.

Attention's gradients are over S_t. The indexer's loss, Σ_h KL(p_h ‖ c), has ∂/∂I = Σ_h (m_h c − p_h) over S_t, where m_h = Σ p_h is 1
less what a sink takes. It is a sum over heads: ranks with some of the heads each have a part of it. I = Σ_i w_i relu(a_i · b) / √(I D)
takes that to a, b and w; b = rotated layer norm.

Source: arXiv:2512.02556, section 2.1; arXiv:2307.08691, algorithms 1 and 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, row_blocks, upcast
from megakernels.ops.attention.facts import PLAIN_QUERIES, PLAIN_SCORES
from megakernels.ops.attention.sinks import add_sinks
from megakernels.ops.indexed_attention.bits import bit_values, packed


class Indexed(NamedTuple):
    """Queries, and the keys among which they choose; otherwise as `indexed_attention` documents them.

    Attributes:
        q: [B, T, H, E], from position `first` on.
        k: [B, S, H, E] with S = first + T.
        v: [B, S, H, V].
        index_q: [B, T, I, D].
        keys: [B, S, D], b: normed and rotated index keys, in the accumulation dtype.
        index_weights: [B, T, I].
        cos: [T, R/2], angles of the queries.
        sin: [T, R/2].
        starts: int32 [B, T] or None, positions in the sequence.
        scale: Factor on the attention scores.
        top_k: Keys that a query attends to.
        loss_factor: Factor of the indexer's loss.
        window: Positions that a query sees, or None.
        sinks: [H] or None.
        first: Position of the first query.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    keys: Tensor
    index_weights: Tensor
    cos: Tensor
    sin: Tensor
    starts: Tensor | None
    scale: float
    top_k: int
    loss_factor: float
    window: int | None
    sinks: Tensor | None = None
    first: int = 0

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Blocks of queries, each with the keys visible to any of them."""
        batch, num_queries, num_heads, _ = self.q.shape
        widest = max(num_heads, self.index_q.shape[2])
        for rows in row_blocks(num_queries, batch * widest * self.k.shape[1], PLAIN_SCORES, PLAIN_QUERIES):
            earliest = 0 if self.window is None else max(0, self.first + rows.start - self.window + 1)
            yield rows, slice(earliest, self.first + rows.stop)

    def visible(self, rows: slice, seen: slice) -> Tensor:
        """[B or 1, q, k], where a query may look."""
        query = torch.arange(self.first + rows.start, self.first + rows.stop, device=self.q.device).unsqueeze(1)
        key = torch.arange(seen.start, seen.stop, device=self.q.device)
        found = key <= query
        if self.window is not None:
            found &= key > query - self.window
        return found.unsqueeze(0) if self.starts is None else found & (key >= self.starts[:, rows].unsqueeze(-1))


@dataclass(frozen=True, slots=True)
class _Index:
    """The operands of index scores, in the accumulation dtype."""

    queries: Tensor  # [B, I, T, D], a
    keys: Tensor  # [B, S, D], b
    weights: Tensor  # [B, I, T], w / √(I D)

    def overlap(self, rows: slice, seen: slice) -> Tensor:
        """relu(a · b), [B, I, q, k]."""
        return (self.queries[:, :, rows] @ self.keys[:, None, seen].mT).relu_()

    def scores(self, overlap: Tensor, rows: slice) -> Tensor:
        """[B, q, k]."""
        return (overlap * self.weights[:, :, rows, None]).sum(1)


def make_keys(index_k: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Index keys [B, S, D] before their norm -> b, normed and rotated, in the accumulation dtype."""
    normed, _ = _normed(index_k, eps)
    return _rotated((normed * upcast(k_scale) + upcast(k_bias)).unsqueeze(2), cos, sin).squeeze(2)


def make_keys_backward(
    grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_k, the norm's scale and its bias."""
    grad = _rotated(grad_keys.unsqueeze(2), cos, -sin).squeeze(2)
    normed, rstd = _normed(index_k, eps)
    scaled = grad * upcast(k_scale)
    centred = scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
    return _like(rstd * centred, index_k), _like((grad * normed).sum((0, 1)), k_scale), _like(grad.sum((0, 1)), k_scale)


def made_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `forward` for these queries and values, uninitialised."""
    batch, num_queries, num_heads, _ = q.shape
    dtype = accumulator_dtype(q.dtype)
    out = torch.empty(batch, num_queries, num_heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, num_queries, dtype=dtype, device=q.device)
    thresholds, index_lse = (torch.empty(batch, num_queries, dtype=dtype, device=q.device) for _ in range(2))
    return out, lse, thresholds, index_lse


def forward(given: Indexed, choice: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out [B, T, H, V] in q's dtype, lse [B, H, T], thresholds [B, T] and index_lse [B, T].

    Into `choice`, int32 [B, T, words], a bit is written for each key that a query chose.
    """
    q, v, index = given.q, given.v, _index(given)
    queries, keys, values = (upcast(each).transpose(1, 2) for each in (q, given.k, v))
    out, lse, thresholds, index_lse = made_like(q, v)
    values_of_bits = bit_values(q.device)
    for rows, seen in given.blocks():
        visible = given.visible(rows, seen)
        scores = index.scores(index.overlap(rows, seen), rows).masked_fill_(~visible, float("-inf"))
        count = scores.shape[-1]
        threshold = scores.topk(given.top_k).values[..., -1] if given.top_k <= count else torch.full_like(scores[..., 0], float("-inf"))
        chosen = _chosen(scores, threshold, visible, given.top_k)
        thresholds[:, rows] = threshold
        if choice is not None:
            choice[:, rows] = packed(chosen, seen, choice.shape[2], values_of_bits)
        index_lse[:, rows] = scores.masked_fill_(~chosen, float("-inf")).logsumexp(-1)
        attended = _attended(given, queries[:, :, rows], keys[:, :, seen], chosen)
        sums = attended.logsumexp(-1)
        lse[:, :, rows] = sums
        out[:, rows] = (attended.sub_(sums.unsqueeze(-1)).exp_() @ values[:, :, seen]).transpose(1, 2)
    return *add_sinks(out, lse, given.sinks), thresholds, index_lse


def backward(grad_out: Tensor, given: Indexed, out: Tensor, lse: Tensor, thresholds: Tensor, index_lse: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of all of `Indexed` before cos, in its order; of keys in the accumulation dtype."""
    index = _index(given)
    queries, keys, values, grads, outs = (upcast(each).transpose(1, 2) for each in (given.q, given.k, given.v, grad_out, out))
    delta = (grads * outs).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = (torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (queries, keys, values))
    grad_a, grad_b, grad_w = (torch.zeros_like(each) for each in (index.queries, index.keys, index.weights))
    for rows, seen in given.blocks():
        overlap = index.overlap(rows, seen)
        scores = index.scores(overlap, rows)
        visible = given.visible(rows, seen)
        chosen = _chosen(scores.masked_fill(~visible, float("-inf")), thresholds[:, rows], visible, given.top_k)
        logits = _attended(given, queries[:, :, rows], keys[:, :, seen], chosen).sub_(lse[:, :, rows, None])
        p = logits.exp()
        grad_v[:, :, seen] += p.mT @ grads[:, :, rows]
        grad_scores = (grads[:, :, rows] @ values[:, :, seen].mT).sub_(delta[:, :, rows]).mul_(p)
        grad_q[:, :, rows] = grad_scores @ keys[:, :, seen] * given.scale
        grad_k[:, :, seen] += grad_scores.mT @ queries[:, :, rows] * given.scale

        difference = _difference(logits, (scores - index_lse[:, rows, None]).masked_fill_(~chosen, float("-inf")), p)
        grad_index = (given.loss_factor * difference).unsqueeze(1)
        grad_w[:, :, rows] = (grad_index * overlap).sum(-1)
        grad_overlap = (grad_index * index.weights[:, :, rows, None]).masked_fill_(overlap == 0, 0)
        grad_a[:, :, rows] = grad_overlap @ index.keys[:, None, seen]
        grad_b[:, seen] += (grad_overlap.mT @ index.queries[:, :, rows]).sum(1)
    width, num_index_heads = index.keys.shape[-1], index.weights.shape[1]
    return (
        *(_like(grad.transpose(1, 2), like) for grad, like in ((grad_q, given.q), (grad_k, given.k), (grad_v, given.v))),
        _like(_rotated(grad_a.transpose(1, 2), given.cos, -given.sin), given.index_q),
        grad_b,
        _like(grad_w.mT * (num_index_heads * width) ** -0.5, given.index_weights),
    )


def _index(given: Indexed) -> _Index:
    queries = _rotated(upcast(given.index_q), given.cos, given.sin).transpose(1, 2)
    num_heads, width = queries.shape[1], queries.shape[3]
    return _Index(queries, given.keys, upcast(given.index_weights).mT * (num_heads * width) ** -0.5)


def _normed(index_k: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The layer norm before its scale and bias, and 1 / σ [B, S, 1]."""
    plain = upcast(index_k)
    centred = plain - plain.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd, rstd


def _chosen(scores: Tensor, threshold: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The `top_k` keys of largest score [B, q, k], of equal scores those that come first; scores are −∞ where a key is not visible."""
    above, equal = scores > threshold.unsqueeze(-1), (scores == threshold.unsqueeze(-1)) & visible
    wanted = top_k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= wanted))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, I, D] with the first R dims rotated by the angles of cos and sin [T, R/2], half-split; the opposite turn has −sin."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


def _attended(given: Indexed, queries: Tensor, keys: Tensor, chosen: Tensor) -> Tensor:
    """Scaled scores of a block [B, H, q, k], −∞ where a key is not chosen."""
    return (queries @ keys.mT).mul_(given.scale).masked_fill_(~chosen.unsqueeze(1), float("-inf"))


def _difference(logits: Tensor, index_logits: Tensor, p: Tensor) -> Tensor:
    """Σ_h (c Σ p_h − p_h), [B, q, k], of log p [B, H, q, k] and log c [B, q, k], −∞ where a key is not chosen; p is overwritten.

    Where the two are close, as early in training, p − c = c (exp(log p − log c) − 1) has the rounding of neither. Sums over keys include
    the sinks' share of p and the rounding of the two log-sum-exps, which scales a whole row; they are subtracted.
    """
    c = index_logits.exp().unsqueeze(1)
    gap = logits.sub_(index_logits.unsqueeze(1))
    near = gap.abs() < 1  # false for −∞ less −∞
    difference = -torch.where(near, gap.expm1_().mul_(c), p.sub_(c)).sum(1)
    return difference - c.squeeze(1) * difference.sum(-1, keepdim=True)


def _like(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.to(like.dtype).contiguous()
