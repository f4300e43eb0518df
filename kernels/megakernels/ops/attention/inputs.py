"""The arguments of attention, and the positions of its queries and keys in the sequence."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megakernels._common import absolute, in_order, piece_rows

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
    causal: bool = True


class Places(NamedTuple):
    """Positions of the queries and order of the keys.

    Attributes:
        firsts: Position of the first query of each piece; the queries are these pieces of one length, one after the other.
        num_ranks: Ranks of a group whose rank i has the pieces i and 2 · num_ranks − 1 − i: the keys are those of all ranks, rank by rank.
            On one rank they are in order.
    """

    firsts: tuple[int, ...] = (0,)
    num_ranks: int = 1


def places_of(piece_length: int, query_pieces: Sequence[int], key_pieces: Sequence[int]) -> Places | None:
    """The places of pieces, or None where there are more than two of queries, or keys in another order than a group gathers them in."""
    num_ranks = len(key_pieces) // 2
    gathered = [piece for rank in range(num_ranks) for piece in (rank, 2 * num_ranks - 1 - rank)]
    is_sorted = list(key_pieces) == sorted(key_pieces)
    if len(query_pieces) > 2 or not (is_sorted or list(key_pieces) == gathered):
        return None
    return Places(tuple(piece * piece_length for piece in query_pieces), 1 if is_sorted else num_ranks)


@dataclass(frozen=True)
class QueryPieces:
    """Queries of some equal pieces of a sequence, and keys of all its pieces in any order.

    Attributes:
        given: The record of the arguments of the torch op.
        query_pieces: Numbers of the pieces of the queries.
        key_pieces: Numbers of the pieces of the keys.
    """

    given: Any
    query_pieces: list[int]
    key_pieces: list[int]

    @classmethod
    def binder(cls, record: type) -> Callable[..., "QueryPieces"]:
        """Function of the arguments of a torch op: the record's, and both lists of pieces."""

        def bind(query_pieces: list[int], key_pieces: list[int], **arguments: Any) -> QueryPieces:
            return cls(record(**arguments), query_pieces, key_pieces)

        return bind

    def places(self) -> Places | None:
        """The places of these pieces, or None if the kernels do not support them."""
        return places_of(self.given.q.shape[1] // len(self.query_pieces), self.query_pieces, self.key_pieces)

    def split(self, queries: Sequence[str], keys: Sequence[str], ordered: Sequence[str] = ()) -> Iterator[tuple[slice, slice, int, Any]]:
        """Each piece of the queries: its rows, the keys that it sees, its first position, and the arguments with these rows and keys.

        Args:
            queries: Arguments [B, positions of the queries, ...].
            keys: Arguments [B, positions of the keys, ...], in the order of the pieces of the keys.
            ordered: Arguments of the same shape in the order of the sequence.
        """
        given = self.given
        of_keys = {name: in_order(getattr(given, name), self.key_pieces) for name in keys}
        of_keys |= {name: getattr(given, name) for name in ordered if getattr(given, name) is not None}
        for rows, first in piece_rows(given.q.shape[1], self.query_pieces):
            seen = slice(0, first + rows.stop - rows.start)
            own = {name: tensor[:, seen] for name, tensor in of_keys.items()}
            own |= {name: getattr(given, name)[:, rows] for name in queries}
            yield rows, seen, first, given._replace(**own, starts=absolute(given.starts, rows, first))
