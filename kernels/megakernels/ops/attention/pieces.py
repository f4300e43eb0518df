"""Causal attention of a rank that has some equal pieces of a sequence: its queries, and the keys of all pieces in any order.

Two operations without an autograd formula, forward and backward, for a caller that gathers the keys for each of them and keeps its own
part only (`megarun.parallel.groups.context`). A piece is a run of consecutive positions, and pieces are numbered as the sequence has them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megakernels._common import (
    Cost,
    accumulator_dtype,
    as_stored,
    operation,
    require,
    require_pieces,
    require_starts,
    types_of,
)
from megakernels.ops.attention import reference
from megakernels.ops.attention.choice import chooses_kernels, kernel_backward, kernel_forward, of_relations, runs_kernels
from megakernels.ops.attention.inputs import GRADIENTS, Attention, QueryPieces
from megakernels.ops.attention.relations import require_relations
from megakernels.ops.attention.sinks import add_sinks, gradient_of_sinks, require_sinks
from megakernels.ops.attention.sizes import backward_cost, backward_inside, forward_cost, forward_inside

__all__ = ["attention_pieces", "attention_pieces_backward"]


def attention_pieces(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None,
    scale: float, window: int | None, query_pieces: Sequence[int], key_pieces: Sequence[int],
    sinks: Tensor | None = None, classes: Tensor | None = None, relations: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `megakernels.attention`, for the queries of some pieces.

    Args:
        q: [B, t · len(query_pieces), Hq, D].
        k: [B, t · len(key_pieces), Hkv, D].
        v: [B, t · len(key_pieces), Hkv, Dv].
        starts: int32, one for each query, or None: first position of its document, counted from the first position of its own piece, so
            negative for a document that begins before the piece.
        scale: Factor on the scores.
        window: See `megakernels.attention`.
        query_pieces: Numbers of the pieces of q, in order.
        key_pieces: Numbers of the pieces of k and v, in order: every piece of the sequence.
        sinks: [Hq] or None, as for whole sequences.
        classes: int32 or None, one for each position of the sequence, in its order.
        relations: [R, Hq] or None, as for whole sequences.
        cap: See `megakernels.attention`.

    Returns:
        out, shaped as q with v's width, and lse fp32 [B, Hq, positions of q].

    Scratch:
        As `attention`.

    Triton:
        The kernels of `attention`, which read the keys in place. More than two pieces of queries, or keys in another order
        than that of a context-parallel group, stay with plain torch.

    Raises:
        ValueError: Shapes do not fit, or a piece of q is not among k's.
    """
    require(k.shape[1] == v.shape[1], "attention_pieces", "k and v must have the same positions", k=k.shape, v=v.shape)
    require_pieces("attention_pieces", q.shape[1], k.shape[1], query_pieces, key_pieces)
    require_starts("attention_pieces", starts, q.shape[:2])
    out: Tensor
    lse: Tensor
    require_sinks("attention_pieces", sinks, q)
    require_relations("attention_pieces", classes, relations, q, k)
    out, lse = _pieces(q, k, v, starts, scale, window, sinks, classes, relations, cap, True, list(query_pieces), list(key_pieces))
    return out, lse


def attention_pieces_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, window: int | None, query_pieces: Sequence[int], key_pieces: Sequence[int],
    sinks: Tensor | None = None, classes: Tensor | None = None, relations: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v and, if given, of sinks and relations, for all except q the part from these queries.

    Arguments are those of `attention_pieces`.
    """
    pieces = list(query_pieces), list(key_pieces)
    return tuple(_pieces_backward(grad_out, q, k, v, starts, sinks, classes, relations, out, lse, scale, window, cap, True, *pieces))


def _split(pieces: QueryPieces) -> Iterator[tuple[slice, slice, int, Attention]]:
    return pieces.split(("q",), ("k", "v"), ordered=("classes",))


def _forward(pieces: QueryPieces) -> tuple[Tensor, Tensor]:
    return add_sinks(*_without_sinks(pieces), pieces.given.sinks)


def _without_sinks(pieces: QueryPieces) -> tuple[Tensor, Tensor]:
    places = pieces.places()
    if places is not None and runs_kernels(pieces.given):
        return kernel_forward(pieces.given, places)
    outs, sums = zip(*(reference.forward(given, first) for _, _, first, given in _split(pieces)), strict=True)
    return torch.cat(outs, 1), torch.cat(sums, 2)


def _backward(grad_out: Tensor, pieces: QueryPieces, out: Tensor, lse: Tensor) -> Sequence[Tensor | None]:
    places = pieces.places()
    if places is not None and runs_kernels(pieces.given):
        return kernel_backward(grad_out, pieces.given, out, lse, places)
    q, k, v = pieces.given[:3]
    grad_keys, grad_values = (torch.zeros(like.shape, dtype=accumulator_dtype(q.dtype), device=like.device) for like in (k, v))
    added = None
    queries = []
    for rows, seen, first, given in _split(pieces):
        found = reference.backward(grad_out[:, rows], given, out[:, rows], lse[:, :, rows], (True,) * 4, first)
        grad_q, grad_k, grad_v, *more = (gradient for gradient in found if gradient is not None)
        queries.append(grad_q)
        grad_keys[:, seen] += grad_k
        grad_values[:, seen] += grad_v
        for part in more:
            added = part.new_zeros(*part.shape[:2], k.shape[1]) if added is None else added
            added[..., seen] += part
    stored = (as_stored(grad, pieces.key_pieces).to(q.dtype) for grad in (grad_keys, grad_values))
    of_sinks = gradient_of_sinks(grad_out, out, lse, pieces.given.sinks)
    return [torch.cat(queries, 1), *stored, of_sinks, of_relations(pieces.given, added)]


def _chooses_kernels(pieces: QueryPieces) -> bool:
    return pieces.places() is not None and chooses_kernels(pieces.given)


def _forward_scratch(pieces: QueryPieces) -> int:
    return forward_inside(pieces.given) if _chooses_kernels(pieces) else 0


def _backward_scratch(grad_out: Tensor, pieces: QueryPieces, out: Tensor, lse: Tensor) -> int:
    return backward_inside(grad_out, pieces.given, out, lse) if _chooses_kernels(pieces) else 0


def _forward_cost(pieces: QueryPieces) -> Cost:
    places = pieces.places()
    return Cost({}) if places is None else forward_cost(pieces.given, places)


def _backward_cost(_grad_out: Tensor, pieces: QueryPieces, _out: Tensor, _lse: Tensor) -> Cost:
    places = pieces.places()
    return Cost({}) if places is None else backward_cost(pieces.given, places)


_pieces, _pieces_backward = operation(
    "attention_pieces",
    types_of(Attention) | {"query_pieces": list[int], "key_pieces": list[int]},
    QueryPieces.binder(Attention),
    outputs=("out", "lse"),
    saved=("out", "lse"),
    gradients=GRADIENTS,
    forward=_forward,
    backward=_backward,
    fake=lambda pieces: reference.made_like(pieces.given),
    differentiable=False,
    forward_scratch=_forward_scratch,
    backward_scratch=_backward_scratch,
    forward_cost=_forward_cost,
    backward_cost=_backward_cost,
)
