"""Attention to chosen keys of a rank that has some equal pieces of a sequence: its queries, and the keys of all pieces in any order.

Two operations without an autograd formula, like those of `megakernels.ops.attention.pieces`. A choice has its keys in the order of the
sequence, wherever they are stored.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megakernels._common import (
    Cost,
    accumulator_dtype,
    as_stored,
    operation,
    require_pieces,
    require_starts,
    types_of,
)
from megakernels.ops.attention.choice import chooses_kernels, runs_kernels
from megakernels.ops.attention.inputs import QueryPieces
from megakernels.ops.attention.sinks import add_sinks, gradient_of_sinks, require_sinks
from megakernels.ops.attention.sizes import backward_cost, forward_cost
from megakernels.ops.chosen_attention import reference, runs
from megakernels.ops.chosen_attention.inputs import Chosen
from megakernels.ops.chosen_attention.op import require_chosen

__all__ = ["chosen_attention_pieces", "chosen_attention_pieces_backward"]


def chosen_attention_pieces(
    q: Tensor, k: Tensor, v: Tensor, choice: Tensor, starts: Tensor | None,
    scale: float, window: int | None, query_pieces: Sequence[int], key_pieces: Sequence[int],
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `megakernels.chosen_attention`, for the queries of some pieces.

    Args:
        q: [B, t · len(query_pieces), H, E].
        k: [B, t · len(key_pieces), H, E].
        v: [B, t · len(key_pieces), H, V].
        choice: int32 [B, positions of q, words of the positions of k], as `indexed_attention_pieces_choice` makes it.
        starts: int32, one for each query, or None: first position of its document, counted from the first position of its own piece.
        scale: Factor on the scores.
        window: See `megakernels.attention`.
        query_pieces: Numbers of the pieces of q, in order.
        key_pieces: Numbers of the pieces of k and v, in order: every piece of the sequence.
        sinks: [H] or None.

    Returns:
        out, shaped as q with v's width, and lse fp32 [B, H, positions of q].

    Scratch:
        As `chosen_attention`.

    Triton:
        As `attention_pieces`, with the choice as a mask.

    Raises:
        ValueError: Shapes do not fit, or a piece of q is not among k's.
    """
    require_chosen("chosen_attention_pieces", q, k, v, choice)
    require_pieces("chosen_attention_pieces", q.shape[1], k.shape[1], query_pieces, key_pieces)
    require_starts("chosen_attention_pieces", starts, q.shape[:2])
    require_sinks("chosen_attention_pieces", sinks, q)
    out: Tensor
    lse: Tensor
    out, lse = _pieces(q, k, v, choice, starts, scale, window, sinks, list(query_pieces), list(key_pieces))
    return out, lse


def chosen_attention_pieces_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, choice: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, window: int | None, query_pieces: Sequence[int], key_pieces: Sequence[int],
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v and, if given, of sinks, for all except q the part from these queries.

    Arguments are those of `chosen_attention_pieces`.
    """
    pieces = list(query_pieces), list(key_pieces)
    return tuple(_pieces_backward(grad_out, q, k, v, choice, starts, sinks, out, lse, scale, window, *pieces))


def _split(pieces: QueryPieces) -> Iterator[tuple[slice, slice, int, Chosen]]:
    return pieces.split(("q", "choice"), ("k", "v"))


def _forward(pieces: QueryPieces) -> tuple[Tensor, Tensor]:
    return add_sinks(*_without_sinks(pieces), pieces.given.sinks)


def _without_sinks(pieces: QueryPieces) -> tuple[Tensor, Tensor]:
    places = pieces.places()
    if places is not None and runs_kernels(pieces.given.attended):
        return runs.masked_forward(pieces.given, places)
    outs, sums = zip(*(reference.forward(given, first) for _, _, first, given in _split(pieces)), strict=True)
    return torch.cat(outs, 1), torch.cat(sums, 2)


def _backward(grad_out: Tensor, pieces: QueryPieces, out: Tensor, lse: Tensor) -> Sequence[Tensor | None]:
    places = pieces.places()
    if places is not None and runs_kernels(pieces.given.attended):
        return runs.masked_backward(grad_out, pieces.given, out, lse, places)
    q, k, v = pieces.given[:3]
    grad_keys, grad_values = (torch.zeros(like.shape, dtype=accumulator_dtype(q.dtype), device=like.device) for like in (k, v))
    queries = []
    for rows, seen, first, given in _split(pieces):
        grad_q, grad_k, grad_v = reference.backward(grad_out[:, rows], given, out[:, rows], lse[:, :, rows], first)
        queries.append(grad_q)
        grad_keys[:, seen] += grad_k
        grad_values[:, seen] += grad_v
    stored = (as_stored(grad, pieces.key_pieces).to(q.dtype) for grad in (grad_keys, grad_values))
    return [torch.cat(queries, 1), *stored, gradient_of_sinks(grad_out, out, lse, pieces.given.sinks)]


def _chooses_kernels(pieces: QueryPieces) -> bool:
    return pieces.places() is not None and chooses_kernels(pieces.given.attended)


def _forward_scratch(pieces: QueryPieces) -> int:
    return runs.forward_inside(pieces.given) if _chooses_kernels(pieces) else 0


def _backward_scratch(grad_out: Tensor, pieces: QueryPieces, out: Tensor, lse: Tensor) -> int:
    return runs.backward_inside(grad_out, pieces.given, out, lse) if _chooses_kernels(pieces) else 0


def _forward_cost(pieces: QueryPieces) -> Cost:
    places = pieces.places()
    return Cost({}) if places is None else forward_cost(pieces.given.attended, places)


def _backward_cost(_grad_out: Tensor, pieces: QueryPieces, _out: Tensor, _lse: Tensor) -> Cost:
    places = pieces.places()
    return Cost({}) if places is None else backward_cost(pieces.given.attended, places)


_pieces, _pieces_backward = operation(
    "chosen_attention_pieces",
    types_of(Chosen) | {"query_pieces": list[int], "key_pieces": list[int]},
    QueryPieces.binder(Chosen),
    outputs=("out", "lse"),
    saved=("out", "lse"),
    gradients=runs.GRADIENTS,
    forward=_forward,
    backward=_backward,
    fake=lambda pieces: runs.made_like(pieces.given.attended),
    differentiable=False,
    forward_scratch=_forward_scratch,
    backward_scratch=_backward_scratch,
    forward_cost=_forward_cost,
    backward_cost=_backward_cost,
)
