"""Attention to chosen keys in plain torch, a block of queries at a time, with explicit backward formulas.

s = scale · q kᵀ over the chosen keys, lse = log Σ exp s, p = exp(s − lse), out = p v. The backward recomputes p from lse. With δ = Σ
∂L/∂out ⊙ out: ∂L/∂v = pᵀ ∂L/∂out, ds = p ⊙ (∂L/∂out vᵀ − δ), ∂L/∂q = scale · ds k, ∂L/∂k = scale · dsᵀ q.

Queries may be a piece of a sequence: they come from position `first` on, and keys are all of the sequence up to the piece's end.

Source: arXiv:2307.08691, algorithms 1 and 2.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megakernels._common import row_blocks, upcast
from megakernels.ops.attention.reference import BLOCK_QUERIES, SCRATCH_ELEMENTS, made_like
from megakernels.ops.chosen_attention.inputs import Chosen
from megakernels.ops.indexed_attention.bits import unpacked


def forward(given: Chosen, first: int = 0) -> tuple[Tensor, Tensor]:
    """Returns out [B, T, H, V] in q's dtype and lse [B, H, T]."""
    queries, keys, values = (upcast(each).transpose(1, 2) for each in given[:3])
    out, lse = made_like(given.attended)
    for rows, seen in _blocks(given, first):
        scores = _scores(given, queries[:, :, rows], keys[:, :, seen], rows, seen)
        sums = scores.logsumexp(-1)
        lse[:, :, rows] = sums
        out[:, rows] = (scores.sub_(sums.unsqueeze(-1)).exp_() @ values[:, :, seen]).transpose(1, 2)
    return out, lse


def backward(grad_out: Tensor, given: Chosen, out: Tensor, lse: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    queries, keys, values, grads, outs = (upcast(each).transpose(1, 2) for each in (*given[:3], grad_out, out))
    delta = (grads * outs).sum(-1, keepdim=True)
    found = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (queries, keys, values)]
    grad_q, grad_k, grad_v = found
    for rows, seen in _blocks(given, first):
        p = _scores(given, queries[:, :, rows], keys[:, :, seen], rows, seen).sub_(lse[:, :, rows, None]).exp_()
        grad_v[:, :, seen] += p.mT @ grads[:, :, rows]
        grad_scores = (grads[:, :, rows] @ values[:, :, seen].mT).sub_(delta[:, :, rows]).mul_(p)
        grad_q[:, :, rows] = grad_scores @ keys[:, :, seen] * given.scale
        grad_k[:, :, seen] += grad_scores.mT @ queries[:, :, rows] * given.scale
    of_q, of_k, of_v = (grad.transpose(1, 2).to(like.dtype).contiguous() for grad, like in zip(found, given[:3], strict=True))
    return of_q, of_k, of_v


def _blocks(given: Chosen, first: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that any of them may have chosen."""
    batch, num_queries, num_heads, _ = given.q.shape
    for rows in row_blocks(num_queries, batch * num_heads * given.k.shape[1], SCRATCH_ELEMENTS, BLOCK_QUERIES):
        earliest = 0 if given.window is None else max(0, first + rows.start - given.window + 1)
        yield rows, slice(earliest, first + rows.stop)


def _scores(given: Chosen, queries: Tensor, keys: Tensor, rows: slice, seen: slice) -> Tensor:
    """Scaled scores of a block [B, H, q, k], −∞ where a key is not chosen."""
    chosen = unpacked(given.choice[:, rows], seen)
    return (queries @ keys.mT).mul_(given.scale).masked_fill_(~chosen.unsqueeze(1), float("-inf"))
