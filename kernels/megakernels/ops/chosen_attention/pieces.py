"""Attention to chosen keys of a rank that has some equal pieces of a sequence: its queries, and the keys of all pieces in any order.

Two operations without an autograd formula, like those of `megakernels.ops.attention.pieces`. A choice has its keys in the order of the
sequence, wherever they are stored.
"""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import require_pieces, require_starts
from megakernels.ops.attention.in_pieces import AttentionOfPieces
from megakernels.ops.attention.sinks import require_sinks
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
    made: tuple[Tensor, Tensor] = _pieces(q, k, v, choice, starts, scale, window, sinks, list(query_pieces), list(key_pieces))
    return made


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


_pieces, _pieces_backward = AttentionOfPieces(
    record=Chosen,
    queries=("q", "choice"),
    ordered=(),
    gradients=runs.GRADIENTS,
    attended=lambda given: given.attended,
    run=runs.masked_forward,
    run_backward=runs.masked_backward,
    plain=reference.forward,
    plain_backward=reference.backward,
    inside=runs.forward_inside,
    inside_backward=runs.backward_inside,
).register("chosen_attention_pieces")
