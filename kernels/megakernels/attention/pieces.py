"""Causal attention of a rank that has some equal pieces of a sequence: its queries, and the keys of all pieces in any order.

Two operations without an autograd formula, forward and backward, for a caller that gathers the keys for each of them and keeps its own
part only (`megarun.parallel.groups.context`). A piece is a run of consecutive positions, and pieces are numbered as the sequence has them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import absolute, accumulator_dtype, as_stored, in_order, piece_rows, require, require_pieces, require_starts
from megakernels.attention import reference

__all__ = ["attention_pieces", "attention_pieces_backward"]


def attention_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    scale: float,
    window: int | None,
    query_pieces: Sequence[int],
    key_pieces: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """See `megakernels.attention.attention`, for the queries of some pieces.

    Args:
        q: [B, t · len(query_pieces), Hq, D].
        k: [B, t · len(key_pieces), Hkv, D].
        v: [B, t · len(key_pieces), Hkv, Dv].
        starts: int32, one for each query, or None: first position of its document, counted from the first position of its own piece, so
            negative for a document that begins before the piece.
        scale: Factor on the scores.
        window: As for whole sequences.
        query_pieces: Numbers of the pieces of q, in order.
        key_pieces: Numbers of the pieces of k and v, in order: every piece of the sequence.

    Returns:
        out, shaped as q with v's width, and lse fp32 [B, Hq, positions of q].

    Raises:
        ValueError: Shapes do not fit, or a piece of q is none of k's.
    """
    require(k.shape[1] == v.shape[1], "attention_pieces", "k and v must have the same positions", k=k.shape, v=v.shape)
    require_pieces("attention_pieces", q.shape[1], k.shape[1], query_pieces, key_pieces)
    require_starts("attention_pieces", starts, q.shape[:2])
    out: Tensor
    lse: Tensor
    out, lse = _pieces(q, k, v, starts, scale, window, list(query_pieces), list(key_pieces))
    return out, lse


def attention_pieces_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    query_pieces: Sequence[int],
    key_pieces: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, of k and v the part that these queries make; arguments and results of `attention_pieces`."""
    grad_q, grad_k, grad_v = _pieces_backward(grad_out, q, k, v, starts, out, lse, scale, window, list(query_pieces), list(key_pieces))
    return grad_q, grad_k, grad_v


@custom_op("megakernels::attention_pieces", mutates_args=())
def _pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    scale: float,
    window: int | None,
    query_pieces: list[int],
    key_pieces: list[int],
) -> tuple[Tensor, Tensor]:
    keys, values = in_order(k, key_pieces), in_order(v, key_pieces)
    outs, sums = [], []
    for rows, first in piece_rows(q.shape[1], query_pieces):
        visible = slice(0, first + rows.stop - rows.start)
        out, lse = reference.forward(q[:, rows], keys[:, visible], values[:, visible], absolute(starts, rows, first), scale, window, first)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 1), torch.cat(sums, 2)


@custom_op("megakernels::attention_pieces_backward", mutates_args=())
def _pieces_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    query_pieces: list[int],
    key_pieces: list[int],
) -> list[Tensor]:
    keys, values = in_order(k, key_pieces), in_order(v, key_pieces)
    dtype = accumulator_dtype(q.dtype)
    grad_keys, grad_values = (torch.zeros(like.shape, dtype=dtype, device=like.device) for like in (keys, values))
    queries = []
    for rows, first in piece_rows(q.shape[1], query_pieces):
        visible = slice(0, first + rows.stop - rows.start)
        found = reference.backward(
            grad_out[:, rows],
            q[:, rows],
            keys[:, visible],
            values[:, visible],
            absolute(starts, rows, first),
            out[:, rows],
            lse[:, :, rows],
            scale,
            window,
            (True, True, True),
            first,
        )
        grad_q, grad_k, grad_v = (gradient for gradient in found if gradient is not None)
        queries.append(grad_q)
        grad_keys[:, visible] += grad_k
        grad_values[:, visible] += grad_v
    stored = (as_stored(grad, key_pieces).to(q.dtype) for grad in (grad_keys, grad_values))
    return [torch.cat(queries, 1), *stored]


@_pieces.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, num_positions, num_heads, _width = q.shape
    lse = q.new_empty((batch, num_heads, num_positions), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, num_positions, num_heads, v.shape[-1])), lse


@_pieces_backward.register_fake
def _(_grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (q, k, v)]
