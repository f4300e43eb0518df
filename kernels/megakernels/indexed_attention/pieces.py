"""Indexed attention of a rank that has some equal pieces of a sequence: its queries, and the keys of all pieces in any order.

Operations without an autograd formula, forward and backward, for a caller that gathers keys for each of them and keeps its own part only
(`megarun.parallel.groups.context_indexer`). A query chooses among all keys before it, wherever they are stored, as on one rank. What is
gathered of the indexer is its keys after norm and rotation, for the angles are those of a rank's own positions.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import absolute, accumulator_dtype, as_stored, in_order, piece_rows, require, require_pieces, require_starts
from megakernels.indexed_attention import reference
from megakernels.indexed_attention.reference import Indexed

__all__ = ["Settings", "index_keys", "index_keys_backward", "indexed_attention_pieces", "indexed_attention_pieces_backward"]


class Settings(NamedTuple):
    """Numbers of `indexed_attention_pieces`.

    Attributes:
        scale: Factor on the attention scores.
        top_k: Keys that a query attends to; all where it sees no more.
        loss_factor: Of the indexer's loss.
        window: As for whole sequences.
        query_pieces: Numbers of the pieces of queries, in order.
        key_pieces: Numbers of the pieces of keys, in order: every piece of the sequence.
    """

    scale: float
    top_k: int
    loss_factor: float
    window: int | None
    query_pieces: Sequence[int]
    key_pieces: Sequence[int]


def index_keys(index_k: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Index keys of own positions [B, t, D], layer-normed and rotated by own angles: fp32 [B, t, D]."""
    keys: Tensor = _index_keys(index_k, k_scale, k_bias, cos, sin, eps)
    return keys


def index_keys_backward(
    grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_k, k_scale and k_bias, from that of the keys, fp32 [B, t, D]."""
    grad_k, grad_scale, grad_bias = _index_keys_backward(grad_keys, index_k, k_scale, cos, sin, eps)
    return grad_k, grad_scale, grad_bias


def indexed_attention_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    keys: Tensor,
    index_weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `megakernels.indexed_attention.indexed_attention`, for the queries of some pieces.

    Args:
        q: [B, t · len(query_pieces), H, E].
        k: [B, t · len(key_pieces), H, E].
        v: [B, t · len(key_pieces), H, V].
        index_q: [B, t · len(query_pieces), I, D].
        keys: fp32 [B, t · len(key_pieces), D], what `index_keys` made on every rank.
        index_weights: [B, t · len(query_pieces), I].
        cos: [t · len(query_pieces), R/2], angles of the queries.
        sin: The same.
        starts: int32, one for each query, or None: first position of its document, counted from the first position of its own piece.
        settings: The rest.

    Returns:
        out, shaped as q with v's width; lse fp32 [B, H, positions of q]; thresholds and log-sum-exps of index scores, fp32 [B, the same].

    Raises:
        ValueError: Shapes do not fit, or a piece of q is none of k's.
    """
    positions = k.shape[1]
    fits = v.shape[1] == keys.shape[1] == positions and index_q.shape[:2] == index_weights.shape[:2] == q.shape[:2]
    shapes = {"k": k.shape, "v": v.shape, "keys": keys.shape, "q": q.shape, "index_q": index_q.shape, "index_weights": index_weights.shape}
    require(fits, "indexed_attention_pieces", "queries and keys must each have the same positions", **shapes)
    require_pieces("indexed_attention_pieces", q.shape[1], positions, settings.query_pieces, settings.key_pieces)
    require_starts("indexed_attention_pieces", starts, q.shape[:2])
    out, lse, thresholds, index_lse = _pieces(q, k, v, index_q, keys, index_weights, cos, sin, starts, *_plain(settings))
    return out, lse, thresholds, index_lse


def indexed_attention_pieces_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    keys: Tensor,
    index_weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    made: Sequence[Tensor],
    settings: Settings,
) -> list[Tensor]:
    """Gradients of q, index_q and index_weights, then of k, v and keys the part that these queries make.

    `made` is what `indexed_attention_pieces` returned; the other arguments are its.
    """
    found: list[Tensor] = _pieces_backward(grad_out, q, k, v, index_q, keys, index_weights, cos, sin, starts, *made, *_plain(settings))
    return found


def _plain(settings: Settings) -> tuple[Any, ...]:
    return (*settings[:4], list(settings.query_pieces), list(settings.key_pieces))


@custom_op("megakernels::index_keys", mutates_args=())
def _index_keys(index_k: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return reference.make_keys(index_k, k_scale, k_bias, cos, sin, eps)


@custom_op("megakernels::index_keys_backward", mutates_args=())
def _index_keys_backward(grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float) -> list[Tensor]:
    return list(reference.make_keys_backward(grad_keys, index_k, k_scale, cos, sin, eps))


@custom_op("megakernels::indexed_attention_pieces", mutates_args=())
def _pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    keys: Tensor,
    index_weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    scale: float,
    top_k: int,
    loss_factor: float,
    window: int | None,
    query_pieces: list[int],
    key_pieces: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    settings = Settings(scale, top_k, loss_factor, window, query_pieces, key_pieces)
    ordered = tuple(in_order(tensor, key_pieces) for tensor in (k, v, keys))
    made = [reference.forward(given) for _, given in _split(q, index_q, index_weights, cos, sin, starts, ordered, settings)]
    outs, sums, thresholds, index_sums = zip(*made, strict=True)
    return torch.cat(outs, 1), torch.cat(sums, 2), torch.cat(thresholds, 1), torch.cat(index_sums, 1)


@custom_op("megakernels::indexed_attention_pieces_backward", mutates_args=())
def _pieces_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    keys: Tensor,
    index_weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    thresholds: Tensor,
    index_lse: Tensor,
    scale: float,
    top_k: int,
    loss_factor: float,
    window: int | None,
    query_pieces: list[int],
    key_pieces: list[int],
) -> list[Tensor]:
    settings = Settings(scale, top_k, loss_factor, window, query_pieces, key_pieces)
    ordered = tuple(in_order(tensor, key_pieces) for tensor in (k, v, keys))
    sums = [torch.zeros(each.shape, dtype=accumulator_dtype(q.dtype), device=q.device) for each in ordered]
    own = []
    for rows, given in _split(q, index_q, index_weights, cos, sin, starts, ordered, settings):
        made = out[:, rows], lse[:, :, rows], thresholds[:, rows], index_lse[:, rows]
        grad_q, grad_k, grad_v, grad_a, grad_keys, grad_w = reference.backward(grad_out[:, rows], given, *made)
        own.append((grad_q, grad_a, grad_w))
        for total, part in zip(sums, (grad_k, grad_v, grad_keys), strict=True):
            total[:, : part.shape[1]] += part
    stored = (as_stored(total, key_pieces).to(like.dtype) for total, like in zip(sums, ordered, strict=True))
    return [*(torch.cat(parts, 1) for parts in zip(*own, strict=True)), *stored]


def _split(
    q: Tensor,
    index_q: Tensor,
    index_weights: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    ordered: tuple[Tensor, ...],
    settings: Settings,
) -> Iterator[tuple[slice, Indexed]]:
    """Every piece of the queries, its rows and what it sees of k, v and keys in the order of the sequence."""
    for rows, first in piece_rows(q.shape[1], settings.query_pieces):
        k, v, keys = (tensor[:, : first + rows.stop - rows.start] for tensor in ordered)
        queries, weights, own = index_q[:, rows], index_weights[:, rows], absolute(starts, rows, first)
        yield rows, Indexed(q[:, rows], k, v, queries, keys, weights, cos[rows], sin[rows], own, *settings[:4], first)


@_index_keys.register_fake
def _(index_k: Tensor, *_: Any) -> Tensor:
    return index_k.new_empty(index_k.shape, dtype=accumulator_dtype(index_k.dtype))


@_index_keys_backward.register_fake
def _(_grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, *_: Any) -> list[Tensor]:
    return [index_k.new_empty(index_k.shape), k_scale.new_empty(k_scale.shape), k_scale.new_empty(k_scale.shape)]


@_pieces.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, num_positions, num_heads, _width = q.shape
    dtype, rows = accumulator_dtype(q.dtype), (batch, num_positions)
    lse = q.new_empty((batch, num_heads, num_positions), dtype=dtype)
    return q.new_empty((*rows, num_heads, v.shape[-1])), lse, q.new_empty(rows, dtype=dtype), q.new_empty(rows, dtype=dtype)


@_pieces_backward.register_fake
def _(_grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, keys: Tensor, index_weights: Tensor, *_: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (q, index_q, index_weights, k, v, keys)]
