"""Equal pieces of a sequence, numbered as the sequence has them and stored in any order."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megakernels._common.shapes import require


def require_pieces(operation: str, num_queries: int, num_keys: int, query_pieces: Sequence[int], key_pieces: Sequence[int]) -> None:
    """Refuses pieces that are not equal, or that are not those of one sequence.

    Raises:
        ValueError: Keys are not every piece once, or a piece of the queries is none of theirs.
    """
    length = num_queries // len(query_pieces)
    fits = num_queries == length * len(query_pieces) and num_keys == length * len(key_pieces)
    known = sorted(key_pieces) == list(range(len(key_pieces))) and set(query_pieces) <= set(key_pieces)
    rule = "pieces must be equal and numbered"
    require(fits and known, operation, rule, queries=num_queries, keys=num_keys, query_pieces=query_pieces, key_pieces=key_pieces)


def piece_rows(num_positions: int, pieces: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Rows of every piece, in the order stored, and the position of its first one in the sequence."""
    length = num_positions // len(pieces)
    for index, piece in enumerate(pieces):
        yield slice(index * length, (index + 1) * length), piece * length


def in_order(tensor: Tensor, numbers: Sequence[int]) -> Tensor:
    """Pieces of [B, T, ...], stored as numbered, as the sequence has them."""
    order = [numbers.index(piece) for piece in range(len(numbers))]
    return torch.unflatten(tensor, 1, (len(numbers), -1))[:, order].flatten(1, 2)


def as_stored(tensor: Tensor, numbers: Sequence[int]) -> Tensor:
    """[B, T, ...] in the order of the sequence, as pieces stored as numbered."""
    return torch.unflatten(tensor, 1, (len(numbers), -1))[:, list(numbers)].flatten(1, 2)


def absolute(starts: Tensor | None, rows: slice, first: int) -> Tensor | None:
    """Document starts of the piece in `rows`, counted from its first position, as positions in the sequence."""
    return None if starts is None else starts[:, rows] + first
