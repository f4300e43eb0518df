"""Causal attention of a rank that has some equal pieces of a sequence: its queries, and the keys of all pieces in any order.

Two operations without an autograd formula, forward and backward, for a caller that gathers the keys for each of them and keeps its own
part only (`megarun.parallel.groups.context`). A piece is a run of consecutive positions, and pieces are numbered as the sequence has them.
"""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import require, require_pieces, require_starts
from megakernels.ops.attention import reference
from megakernels.ops.attention.choice import kernel_backward, kernel_forward
from megakernels.ops.attention.in_pieces import AttentionOfPieces
from megakernels.ops.attention.inputs import GRADIENTS, Attention
from megakernels.ops.attention.relations import require_relations
from megakernels.ops.attention.sinks import require_sinks
from megakernels.ops.attention.sizes import backward_inside, forward_inside

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
    require_sinks("attention_pieces", sinks, q)
    require_relations("attention_pieces", classes, relations, q, k)
    pieces = list(query_pieces), list(key_pieces)
    made: tuple[Tensor, Tensor] = _pieces(q, k, v, starts, scale, window, sinks, classes, relations, cap, True, *pieces)
    return made


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


_pieces, _pieces_backward = AttentionOfPieces(
    record=Attention,
    queries=("q",),
    ordered=("classes",),
    gradients=GRADIENTS,
    attended=lambda given: given,
    run=kernel_forward,
    run_backward=kernel_backward,
    plain=reference.forward,
    plain_backward=lambda grad_out, given, out, lse, first: reference.backward(grad_out, given, out, lse, (True,) * 4, first),
    inside=forward_inside,
    inside_backward=backward_inside,
).register("attention_pieces")
