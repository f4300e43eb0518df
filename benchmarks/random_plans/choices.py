"""Draws from a seed, one stream a section, so that a new key of one section changes no other."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Scope(StrEnum):
    """Scope of a draw: everything that megaplan prices, or only what megarun builds."""

    ANY = "any"
    RUNTIME = "runtime"


class Size(NamedTuple):
    """Magnitude of the numbers of a draw.

    Attributes:
        name: Name within the random streams, so that sizes differ in more than bounds.
        work: Layers times microbatches of an update: what a trace or a step takes time for.
        hidden: Bounds of the residual stream's width.
        width: Largest width of an MLP, an expert or a latent.
        head: Largest width of a head or of a head's state.
        vocabulary: Largest vocabulary.
        seq_length: Most tokens of a sequence.
        few_ranks: True if degrees are 1, 2 or 3.
    """

    name: str
    work: int
    hidden: tuple[int, int]
    width: int
    head: int
    vocabulary: int
    seq_length: int
    few_ranks: bool


LARGE = Size("large", 28, (160, 4096), 3072, 128, 200_000, 4096, few_ranks=False)
"""Size for `make accuracy-random`: tensors are so large that shares of them are meaningful, and no values are computed."""
SMALL = Size("small", 16, (160, 768), 640, 128, 200_000, 512, few_ranks=True)
"""Size for tests that trace or estimate many plans."""
TINY = Size("tiny", 16, (16, 64), 48, 12, 140, 32, few_ranks=False)
"""Size for training on a CPU."""


class Draw(Random):
    """A stream of choices."""

    def chance(self, share: float) -> bool:
        """True in that share of draws."""
        return self.random() < share

    def weighted(self, weights: Mapping[T, float]) -> T:
        """A key, as often as its weight says."""
        return self.choices(list(weights), list(weights.values()))[0]

    def some(self, items: Sequence[T], share: float = 0.5) -> list[T]:
        """A subset in the same order; empty as often as not."""
        return [item for item in items if self.chance(share)] if self.chance(0.5) else []

    def maybe(self, section: dict[str, Any], share: float, **values: Any) -> None:
        """Write each key in that share of draws; a value that can be called is drawn only then."""
        for key, value in values.items():
            if self.chance(share):
                section[key] = value() if callable(value) else value

    def wide(self, low: int, high: int) -> int:
        """An integer, even over the logarithm of its size."""
        return min(high, max(low, round(float(low * (high / low) ** self.random()))))

    def multiple(self, unit: int, low: int, high: int) -> int:
        """A multiple of `unit` between the bounds, or the smallest one above `low`, even over the logarithm."""
        return unit * self.wide(max(1, -(-low // unit)), max(1, -(-low // unit), high // unit))


def divisors(number: int) -> list[int]:
    """Divisors of a positive integer, rising."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})
