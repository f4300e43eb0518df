"""Mixes several token files in fixed proportions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarun.data.identity import DataFiles
from megarun.data.order import shuffled
from megarun.data.token_file import TokenFile, row_numbers
from megarun.errors import refusal

MOST_ROWS_OF_A_BLOCK = 1000
Numbers = TypeVar("Numbers", bound=NDArray[Any])


class TokenMix:
    """Rows of several token files, in proportion to integer weights.

    Training rows are grouped in blocks whose length is the sum of the weights (without common factors); each block has every file's
    share, in an order derived from seed and block number. So the row number alone decides the file and the row in it, without state and
    independent of how ranks share a batch. Each file has its own epochs.
    """

    def __init__(self, sources: Sequence[tuple[TokenFile, int]]) -> None:
        """The files and their weights.

        Raises:
            MegaplanError: MP623 if a weight is below 1, or a block would be longer than 1,000 rows.
        """
        weights = [weight for _, weight in sources]
        if min(weights) < 1:
            raise refusal("MP623", f"weights {', '.join(map(str, weights))}: each must be at least 1")
        self._files = [file for file, _ in sources]
        common = gcd(*weights)
        self._weights = [weight // common for weight in weights]
        if sum(self._weights) > MOST_ROWS_OF_A_BLOCK:
            detail = f"weights {', '.join(map(str, weights))} sum to {sum(self._weights):,} without their common factor"
            raise refusal("MP623", f"{detail}, more than {MOST_ROWS_OF_A_BLOCK:,}")
        self._ends = np.cumsum(self._weights)

    def split(self, fraction: Fraction) -> "tuple[TokenMix, TokenMix]":
        """The mix in two parts, with the same share of every file (`TokenFile.split`) and the same weights."""
        training, held_out = zip(*(file.split(fraction) for file in self._files), strict=True)
        return TokenMix(list(zip(training, self._weights, strict=True))), TokenMix(list(zip(held_out, self._weights, strict=True)))

    @property
    def files(self) -> tuple[TokenFile, ...]:
        """The files, in the order of the mix."""
        return tuple(self._files)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: all ids of all files are below it."""
        return max(file.vocab_size for file in self._files)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text of a token, the files' means in the proportion of their rows."""
        means = zip(self._files, self._weights, strict=True)
        return sum(file.bytes_per_token * weight for file, weight in means) / sum(self._weights)

    @property
    def identity(self) -> DataFiles:
        """The data identity for checkpoints and other ranks: every file with its weight, in order."""
        return tuple(
            replace(of_file, weight=weight) for file, weight in zip(self._files, self._weights, strict=True) for of_file in file.identity
        )

    def num_windows(self, seq_length: int) -> int:
        """Number of rows until the first file would be repeated.

        Raises:
            MegaplanError: MP615 if no window of a file fits.
        """
        blocks = min(file.num_windows(seq_length) // weight for file, weight in zip(self._files, self._weights, strict=True))
        return blocks * int(self._ends[-1])

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.int64]:
        """The global batch of `step`, counted from 0, int64 [num_rows, seq_length + 1]; see `TokenFile.rows`."""
        return self._gathered(TokenFile.read, np.empty((num_rows, seq_length + 1), dtype=np.int64), step, seed)

    def starts(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.int32]:
        """Start of each token's document, int32 [num_rows, seq_length + 1]; see `TokenFile.starts`."""
        return self._gathered(TokenFile.read_starts, np.empty((num_rows, seq_length + 1), dtype=np.int32), step, seed)

    def structure_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.uint8]:
        """Classes of each token of `rows`, uint8 [num_rows, seq_length + 1]; see `TokenFile.structure_rows`."""
        return self._gathered(TokenFile.read_classes, np.empty((num_rows, seq_length + 1), dtype=np.uint8), step, seed)

    def platform_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> NDArray[np.uint8]:
        """Platforms of each token of `rows`, uint8 [num_rows, seq_length + 1]; see `TokenFile.platform_rows`."""
        return self._gathered(TokenFile.read_platforms, np.empty((num_rows, seq_length + 1), dtype=np.uint8), step, seed)

    def _gathered(self, read: Callable[[TokenFile, NDArray[np.int64], int], Numbers], found: Numbers, step: int, seed: int) -> Numbers:
        """Fill [num_rows, seq_length + 1] with each file's rows."""
        num_rows, width = found.shape
        for file, places, numbers in self._shares(row_numbers(step, num_rows), seed):
            found[places] = read(file, file.windows(numbers, seed, width - 1), width - 1)
        return found

    def _shares(self, numbers: NDArray[np.int64], seed: int) -> Iterator[tuple[TokenFile, NDArray[np.int64], NDArray[np.int64]]]:
        """A mask of each file's rows, and their row numbers within the file."""
        length = int(self._ends[-1])
        blocks, positions = np.divmod(numbers, length)
        places = np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            places[here] = shuffled(positions[here], length, seed, block)
        for file, weight, end in zip(self._files, self._weights, self._ends.tolist(), strict=True):
            own = np.flatnonzero((places >= end - weight) & (places < end))
            yield file, own, blocks[own] * weight + places[own] - (end - weight)
