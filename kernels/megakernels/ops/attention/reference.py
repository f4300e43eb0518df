"""Attention in plain torch, a block of queries at a time, with explicit backward formulas.

s = scale · q kᵀ over the visible keys, lse = log Σ exp s, p = exp(s − lse), out = p v. The backward recomputes p from lse. With δ = Σ
∂L/∂out ⊙ out: ∂L/∂v = pᵀ ∂L/∂out, ds = p ⊙ (∂L/∂out vᵀ − δ), ∂L/∂q = scale · ds k, ∂L/∂k = scale · dsᵀ q.
Capped scores are c · tanh(s / c), and ds is times 1 − tanh²(s / c).

Source: Dao, arXiv:2307.08691, algorithms 1 and 2; grouped keys and values, arXiv:2305.13245.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, row_blocks, upcast
from megakernels.ops.attention.facts import PLAIN_QUERIES, PLAIN_SCORES
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.relations import key_scores


def made_like(given: Attention) -> tuple[Tensor, Tensor]:
    """Out and lse, uninitialised."""
    q = given.q
    return torch.empty(*q.shape[:3], given.v.shape[-1], dtype=q.dtype, device=q.device), lse_like(given)


def lse_like(given: Attention) -> Tensor:
    """Lse, uninitialised."""
    q = given.q
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator_dtype(q.dtype), device=q.device)


Hidden = Callable[[slice, slice], Tensor | None]
"""Function of a block's queries and the keys visible to any of them: a mask of keys hidden from a query, [B or 1, 1, 1, q, k], or None."""


def forward(given: Attention, first: int = 0, hides: Hidden | None = None) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, Hq, Dv] in q's dtype and lse [B, Hq, T], without sinks; query i is at position first + i of the keys.

    `hides` replaces the order, the window and the documents, all of which it has to include.
    """
    q, k, v, _, scale = given[:5]
    hides = hides or order_of(given, first)
    groups, keys, values = _by_group(upcast(q) * scale, k.shape[2]), _by_group(upcast(k), k.shape[2]), _by_group(upcast(v), k.shape[2])
    added = _of_keys(key_scores(given.classes, given.relations), k.shape[2])
    out, lse = made_like(given)
    for rows, seen in blocks(given, first):
        scores = scores_of(groups[:, :, :, rows], keys[:, :, :, seen], hides(rows, seen), seen, added, given.cap)
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        out[:, rows] = (per_query(weights, values[:, :, 0, seen]) / total).flatten(1, 2).transpose(1, 2)
        lse[:, :, rows] = (largest + total.log()).squeeze(-1).flatten(1, 2)
    return out, lse


def backward(
    grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, needs: Sequence[bool], first: int = 0, hides: Hidden | None = None
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of q, k and v, and of the keys' scores b [B, H, T] of relations, None where not needed or not given."""
    q, k, v, _, scale = given[:5]
    hides = hides or order_of(given, first)
    num_groups = k.shape[2]
    groups, keys, values = _by_group(upcast(q) * scale, num_groups), _by_group(upcast(k), num_groups), _by_group(upcast(v), num_groups)
    grads = _by_group(upcast(grad_out), num_groups)
    delta = (grads * _by_group(upcast(out), num_groups)).sum(-1, keepdim=True)
    group_lse = torch.unflatten(lse, 1, (num_groups, lse.shape[1] // num_groups)).unsqueeze(-1)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device) if needs[0] else None
    grad_k = torch.zeros_like(keys[:, :, 0]) if needs[1] else None
    grad_v = torch.zeros_like(values[:, :, 0]) if needs[2] else None
    added = _of_keys(key_scores(given.classes, given.relations), num_groups)
    grad_added = torch.zeros_like(added) if added is not None and needs[3] else None
    for rows, seen in blocks(given, first):
        block = grads[:, :, :, rows]
        scores = scores_of(groups[:, :, :, rows], keys[:, :, :, seen], hides(rows, seen), seen, added, given.cap)
        weights = scores.sub_(group_lse[:, :, :, rows]).exp_()
        if grad_v is not None:
            grad_v[:, :, seen] += per_key(weights, block)
        if grad_q is None and grad_k is None and grad_added is None:
            continue
        grad_scores = per_query(block, values[:, :, 0, seen].mT).sub_(delta[:, :, :, rows]).mul_(weights)
        if grad_added is not None:
            grad_added[..., seen] += grad_scores.sum(-2, keepdim=True)
        if given.cap is not None:
            steepness = per_query(groups[:, :, :, rows], keys[:, :, 0, seen].mT).div_(given.cap).tanh_().square_()
            grad_scores.addcmul_(grad_scores, steepness, value=-1)
        if grad_q is not None:
            grad_q[:, rows] = (per_query(grad_scores, keys[:, :, 0, seen]) * scale).flatten(1, 2).transpose(1, 2)
        if grad_k is not None:
            grad_k[:, :, seen] += per_key(grad_scores, groups[:, :, :, rows])
    return grad_q, _as_input(grad_k, k), _as_input(grad_v, v), None if grad_added is None else grad_added.flatten(1, 3)


def _of_keys(added: Tensor | None, num_groups: int) -> Tensor | None:
    """[B, H, T] of keys as [B, num_groups, H / num_groups, 1, T]."""
    return None if added is None else torch.unflatten(added, 1, (num_groups, -1)).unsqueeze(3)


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """[B, T, H, D] as [B, num_groups, H / num_groups, T, D]: the query heads that share a key head, side by side."""
    batch, num_positions, num_heads, width = x.shape
    return x.transpose(1, 2).reshape(batch, num_groups, num_heads // num_groups, num_positions, width)


def blocks(given: Attention, first: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys visible to any of them; the first query is at key `first`."""
    (batch, num_positions, num_heads, _), window = given.q.shape, given.window
    for rows in row_blocks(num_positions, batch * num_heads * (first + num_positions), PLAIN_SCORES, PLAIN_QUERIES):
        begin = 0 if window is None else max(0, first + rows.start - window + 1)
        yield rows, slice(begin, first + rows.stop if given.causal else num_positions)


def order_of(given: Attention, first: int) -> Hidden:
    """Keys after a query, before its window, and of other documents."""

    def hidden(rows: slice, seen: slice) -> Tensor | None:
        if not given.causal:
            return None
        query = torch.arange(first + rows.start, first + rows.stop, device=given.q.device).unsqueeze(1)
        key = torch.arange(seen.start, seen.stop, device=given.q.device)
        found = key > query
        if given.window is not None:
            found |= key <= query - given.window
        if given.starts is not None:
            found = found | (key < given.starts[:, rows].unsqueeze(-1)).unsqueeze(1).unsqueeze(1)  # [B, 1, 1, q, k]
        return found

    return hidden


def scores_of(queries: Tensor, keys: Tensor, hidden: Tensor | None, seen: slice, added: Tensor | None, cap: float | None) -> Tensor:
    """Scaled scores of a block, capped, with the term of each key, −∞ for masked keys."""
    scores = per_query(queries, keys[:, :, 0].mT)
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    if added is not None:
        scores += added[..., seen]
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))


def per_query(queries: Tensor, matrix: Tensor) -> Tensor:
    """[B, G, R, q, a] · [B, G, a, b] as [B, G, R, q, b]; the R heads of a group share the matrix, so they are one matrix product."""
    batch, num_groups, shared, num_queries, _ = queries.shape
    return (queries.flatten(2, 3) @ matrix).view(batch, num_groups, shared, num_queries, matrix.shape[-1])


def per_key(weights: Tensor, queries: Tensor) -> Tensor:
    """Σ over R and q of [B, G, R, q, a]ᵀ · [B, G, R, q, b], as [B, G, a, b]."""
    return weights.flatten(2, 3).mT @ queries.flatten(2, 3)


def _as_input(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.transpose(1, 2).to(like.dtype).contiguous()
