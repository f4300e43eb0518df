"""Indexed attention of a rank that has some equal pieces of a sequence: its queries, and the keys of all pieces in any order.

Operations without an autograd formula, forward and backward, for a caller that gathers keys for each of them and keeps its own part only
(`megarun.parallel.groups.context_indexer`). A query chooses among all keys before it, wherever they are stored, as on one rank. Of the
indexer, keys are gathered after norm and rotation, because the angles are for a rank's own positions.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import (
    Cost,
    accumulator_dtype,
    as_stored,
    operation,
    register_scratch,
    require,
    require_pieces,
    require_starts,
    types_of,
)
from megakernels.ops.attention.inputs import QueryPieces
from megakernels.ops.attention.sinks import gradient_of_sinks, require_sinks
from megakernels.ops.indexed_attention import choice, reference, sizes
from megakernels.ops.indexed_attention.bits import choice_like
from megakernels.ops.indexed_attention.reference import Indexed

__all__ = [
    "IndexedSettings",
    "index_keys",
    "index_keys_backward",
    "indexed_attention_pieces",
    "indexed_attention_pieces_backward",
    "indexed_attention_pieces_choice",
]


class IndexedSettings(NamedTuple):
    """Numbers of `indexed_attention_pieces`.

    Attributes:
        scale: Factor on the attention scores.
        top_k: Keys that a query attends to; all if fewer are visible.
        loss_factor: Factor of the indexer's loss.
        window: See `megakernels.attention`.
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
    """Index keys of own positions [B, t, D], layer-normed and rotated by own angles: fp32 [B, t, D].

    Scratch:
        That of `index_keys_backward`; none forward.

    Triton:
        One kernel. Keys wider than 128 stay with plain torch.
    """
    keys: Tensor = _index_keys(index_k, k_scale, k_bias, cos, sin, eps)
    return keys


def index_keys_backward(
    grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_k, k_scale and k_bias, from that of the keys, fp32 [B, t, D].

    Scratch:
        Parts of the gradients of scale and bias, fp32 [2, programs, D] with at most 64 programs.

    Triton:
        One kernel, and sums of the parts.
    """
    grad_k, grad_scale, grad_bias = _index_keys_backward(grad_keys, index_k, k_scale, cos, sin, eps)
    return grad_k, grad_scale, grad_bias


def indexed_attention_pieces(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, keys: Tensor, index_weights: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None,
    settings: IndexedSettings, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `megakernels.indexed_attention`, for the queries of some pieces.

    Args:
        q: [B, t · len(query_pieces), H, E].
        k: [B, t · len(key_pieces), H, E].
        v: [B, t · len(key_pieces), H, V].
        index_q: [B, t · len(query_pieces), I, D].
        keys: fp32 [B, t · len(key_pieces), D], the results of `index_keys` on every rank.
        index_weights: [B, t · len(query_pieces), I].
        cos: [t · len(query_pieces), R/2], angles of the queries.
        sin: The same.
        starts: int32, one for each query, or None: first position of its document, counted from the first position of its own piece.
        settings: The rest.
        sinks: [H] or None, as for `attention`.

    Returns:
        out, shaped as q with v's width; lse fp32 [B, H, positions of q]; thresholds and log-sum-exps of index scores, fp32 [B, the same].

    Scratch:
        As `indexed_attention`, without the keys and their gradient, which are an argument and a result.

    Triton:
        The kernels of `indexed_attention`, which read the keys in place. More than two pieces of queries, or keys in another
        order than that of a context-parallel group, stay with plain torch.

    Raises:
        ValueError: Shapes do not fit, or a piece of q is not among k's.
    """
    positions = k.shape[1]
    fits = v.shape[1] == keys.shape[1] == positions and index_q.shape[:2] == index_weights.shape[:2] == q.shape[:2]
    shapes = {"k": k.shape, "v": v.shape, "keys": keys.shape, "q": q.shape, "index_q": index_q.shape, "index_weights": index_weights.shape}
    require(fits, "indexed_attention_pieces", "queries and keys must each have the same positions", **shapes)
    require_pieces("indexed_attention_pieces", q.shape[1], positions, settings.query_pieces, settings.key_pieces)
    require_starts("indexed_attention_pieces", starts, q.shape[:2])
    require_sinks("indexed_attention_pieces", sinks, q)
    out, lse, thresholds, index_lse = _pieces(q, k, v, index_q, keys, index_weights, cos, sin, starts, *_plain(settings, sinks))
    return out, lse, thresholds, index_lse


def indexed_attention_pieces_choice(*given: Any, sinks: Tensor | None = None) -> tuple[Tensor, ...]:
    """`indexed_attention_pieces`, of its arguments in order, with the choice last.

    Returns:
        Its results, and the keys of the whole sequence that own queries chose, as from `indexed_attention_choice`: int32 [B, positions of
        q, words], by position in the sequence. The backward is `indexed_attention_pieces_backward`.

    Scratch:
        As `indexed_attention_pieces`; the bits are a result.

    Triton:
        The kernels of `indexed_attention`.
    """
    *tensors, settings = given
    made: tuple[Tensor, ...] = _pieces_choice(*tensors, *_plain(settings, sinks))
    return made


def indexed_attention_pieces_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, keys: Tensor, index_weights: Tensor, cos: Tensor, sin: Tensor,
    starts: Tensor | None, made: Sequence[Tensor],
    settings: IndexedSettings, sinks: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, index_q and index_weights, then of k, v, keys and, if given, sinks the part that these queries make.

    `made` is the result of `indexed_attention_pieces`; the other arguments are the same.
    """
    given = q, k, v, index_q, keys, index_weights, cos, sin, starts, sinks
    found: list[Tensor] = _pieces_backward(grad_out, *given, *made, *_plain(settings))
    return found


def _plain(settings: IndexedSettings, *sinks: Tensor | None) -> tuple[Any, ...]:
    return (*settings[:4], *sinks, list(settings.query_pieces), list(settings.key_pieces))


@custom_op("megakernels::index_keys", mutates_args=())
def _index_keys(index_k: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return choice.make_keys(index_k, k_scale, k_bias, cos, sin, eps)


@custom_op("megakernels::index_keys_backward", mutates_args=())
def _index_keys_backward(grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float) -> list[Tensor]:
    return list(choice.make_keys_backward(grad_keys, index_k, k_scale, cos, sin, eps))


@_index_keys.register_fake
def _(index_k: Tensor, *_: Any) -> Tensor:
    return index_k.new_empty(index_k.shape, dtype=accumulator_dtype(index_k.dtype))


@_index_keys_backward.register_fake
def _(_grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, *_: Any) -> list[Tensor]:
    return [index_k.new_empty(index_k.shape), k_scale.new_empty(k_scale.shape), k_scale.new_empty(k_scale.shape)]


def _keys_backward_scratch(_grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, *_: Any) -> int:
    return choice.keys_backward_inside(index_k, k_scale) if choice.chooses_keys(index_k) else 0


register_scratch(_index_keys_backward, _keys_backward_scratch)


def _split(pieces: QueryPieces) -> Iterator[tuple[slice, Indexed]]:
    """Each piece of the queries: its rows, and the arguments with these rows and the keys that they see."""
    for rows, _, first, own in pieces.split(("q", "index_q", "index_weights"), ("k", "v", "keys")):
        yield rows, own._replace(cos=own.cos[rows], sin=own.sin[rows], first=first)


def _forward(pieces: QueryPieces) -> tuple[Tensor, ...]:
    return _forward_with_choice(pieces)[:4]


def _forward_with_choice(pieces: QueryPieces) -> tuple[Tensor, ...]:
    places, num_keys = pieces.places(), pieces.given.k.shape[1]
    if places is not None and choice.runs_kernels(pieces.given):
        return choice.kernel_forward(pieces.given, places)
    outs, sums, *others = zip(*(choice.chosen_forward(given, num_keys) for _, given in _split(pieces)), strict=True)
    return torch.cat(outs, 1), torch.cat(sums, 2), *(torch.cat(parts, 1) for parts in others)


def _backward(
    grad_out: Tensor, pieces: QueryPieces, out: Tensor, lse: Tensor, thresholds: Tensor, index_lse: Tensor
) -> Sequence[Tensor | None]:
    places = pieces.places()
    if places is not None and choice.runs_kernels(pieces.given):
        grad_q, grad_k, grad_v, grad_index_q, grad_keys, grad_weights, grad_sinks = choice.kernel_backward(
            grad_out, pieces.given, (out, lse, thresholds, index_lse), places
        )
        return grad_q, grad_index_q, grad_weights, grad_k, grad_v, grad_keys, grad_sinks
    likes = pieces.given.k, pieces.given.v, pieces.given.keys
    sums = [torch.zeros(each.shape, dtype=accumulator_dtype(pieces.given.q.dtype), device=each.device) for each in likes]
    own = []
    for rows, given in _split(pieces):
        made = out[:, rows], lse[:, :, rows], thresholds[:, rows], index_lse[:, rows]
        grad_q, grad_k, grad_v, grad_a, grad_keys, grad_w = reference.backward(grad_out[:, rows], given, *made)
        own.append((grad_q, grad_a, grad_w))
        for total, part in zip(sums, (grad_k, grad_v, grad_keys), strict=True):
            total[:, : part.shape[1]] += part
    stored = (as_stored(total, pieces.key_pieces).to(like.dtype) for total, like in zip(sums, likes, strict=True))
    of_sinks = gradient_of_sinks(grad_out, out, lse, pieces.given.sinks)
    return [*(torch.cat(parts, 1) for parts in zip(*own, strict=True)), *stored, of_sinks]


def _forward_scratch(pieces: QueryPieces, *, returns_choice: bool = False) -> int:
    places = pieces.places()
    chosen = places is not None and choice.chooses_kernels(pieces.given)
    return sizes.forward_inside(pieces.given, places, returns_choice=returns_choice) if places is not None and chosen else 0


def _backward_scratch(grad_out: Tensor, pieces: QueryPieces, *made: Tensor) -> int:
    places = pieces.places()
    chosen = places is not None and choice.chooses_kernels(pieces.given)
    return sizes.backward_inside(grad_out, pieces.given, made, places) if places is not None and chosen else 0


def _forward_cost(pieces: QueryPieces) -> Cost:
    places = pieces.places()
    return Cost({}) if places is None else sizes.forward_cost(pieces.given, places)


def _backward_cost(_grad_out: Tensor, pieces: QueryPieces, *_made: Tensor) -> Cost:
    places = pieces.places()
    return Cost({}) if places is None else sizes.backward_cost(pieces.given, places)


def _registered(name: str, *, returns_choice: bool) -> Any:
    """The torch ops of this name, forward and backward; `returns_choice`: true if the choice is a result."""
    saved = ("out", "lse", "thresholds", "index_lse")
    return operation(
        name,
        {name: kind for name, kind in types_of(Indexed).items() if name != "first"} | {"query_pieces": list[int], "key_pieces": list[int]},
        QueryPieces.binder(Indexed),
        outputs=(*saved, "choice") if returns_choice else saved,
        saved=saved,
        gradients=("q", "index_q", "index_weights", "k", "v", "keys", "sinks"),
        forward=_forward_with_choice if returns_choice else _forward,
        backward=_backward,
        fake=_fake_with_choice if returns_choice else lambda pieces: reference.made_like(pieces.given.q, pieces.given.v),
        differentiable=False,
        forward_scratch=partial(_forward_scratch, returns_choice=returns_choice),
        backward_scratch=_backward_scratch,
        forward_cost=_forward_cost,
        backward_cost=_backward_cost,
    )


def _fake_with_choice(pieces: QueryPieces) -> tuple[Tensor, ...]:
    given = pieces.given
    return *reference.made_like(given.q, given.v), choice_like(given.q, given.k.shape[1])


_pieces, _pieces_backward = _registered("indexed_attention_pieces", returns_choice=False)
_pieces_choice, _ = _registered("indexed_attention_pieces_choice", returns_choice=True)
