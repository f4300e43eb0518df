"""Equal pieces of a sequence, numbered in sequence order and stored in any order."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megakernels._common.shapes import require


def require_pieces(operation: str, num_queries: int, num_keys: int, query_pieces: Sequence[int], key_pieces: Sequence[int]) -> None:
    """Refuses pieces that are unequal or do not make up one sequence.

    Raises:
        ValueError: The keys do not have every piece exactly once, or lack a piece of the queries.
    """
    length = num_queries // len(query_pieces)
    fits = num_queries == length * len(query_pieces) and num_keys == length * len(key_pieces)
    known = sorted(key_pieces) == list(range(len(key_pieces))) and set(query_pieces) <= set(key_pieces)
    rule = "pieces must be equal and numbered"
    require(fits and known, operation, rule, queries=num_queries, keys=num_keys, query_pieces=query_pieces, key_pieces=key_pieces)


def piece_rows(num_positions: int, pieces: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Rows of every piece, in storage order, and the position of the first row in the sequence."""
    length = num_positions // len(pieces)
    for index, piece in enumerate(pieces):
        yield slice(index * length, (index + 1) * length), piece * length


def in_order(tensor: Tensor, numbers: Sequence[int]) -> Tensor:
    """[B, T, ...] reordered from the storage order given by `numbers` to sequence order."""
    order = [numbers.index(piece) for piece in range(len(numbers))]
    return torch.unflatten(tensor, 1, (len(numbers), -1))[:, order].flatten(1, 2)


def as_stored(tensor: Tensor, numbers: Sequence[int]) -> Tensor:
    """[B, T, ...] reordered from sequence order to the storage order given by `numbers`."""
    return torch.unflatten(tensor, 1, (len(numbers), -1))[:, list(numbers)].flatten(1, 2)


def absolute(starts: Tensor | None, rows: slice, first: int) -> Tensor | None:
    """Document starts of the piece in `rows`, converted from piece-relative to absolute positions."""
    return None if starts is None else starts[:, rows] + first
