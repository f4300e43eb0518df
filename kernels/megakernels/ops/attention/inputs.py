"""The arguments of attention, and the positions of its queries and keys in the sequence."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

GRADIENTS = ("q", "k", "v", "sinks", "relations")


class Attention(NamedTuple):
    """The arguments of the torch op, as `attention` documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor | None
    scale: float
    window: int | None
    sinks: Tensor | None = None
    classes: Tensor | None = None
    relations: Tensor | None = None
    cap: float | None = None


class Places(NamedTuple):
    """Positions of the queries and order of the keys.

    Attributes:
        firsts: Position of the first query of each piece; the queries are these pieces, of one length, side by side.
        num_ranks: Of a group whose rank i has the pieces i and 2 · num_ranks − 1 − i: the keys are those of all ranks, rank by rank. On
            one rank they are in order.
    """

    firsts: tuple[int, ...] = (0,)
    num_ranks: int = 1


def places_of(piece_length: int, query_pieces: Sequence[int], key_pieces: Sequence[int]) -> Places | None:
    """The places of pieces, or None where there are more than two of queries, or keys in another order than a group gathers them in."""
    num_ranks = len(key_pieces) // 2
    gathered = [piece for rank in range(num_ranks) for piece in (rank, 2 * num_ranks - 1 - rank)]
    in_order = list(key_pieces) == sorted(key_pieces)
    if len(query_pieces) > 2 or not (in_order or list(key_pieces) == gathered):
        return None
    return Places(tuple(piece * piece_length for piece in query_pieces), 1 if in_order else num_ranks)
