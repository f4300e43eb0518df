"""Limits on the contents of a slot, or of the two slots of a V's rank: sums of weights of spans.

They are monotone: spans within them stay within them when layers are removed from either end. So a slot's possible spans after a given cut
follow from the longest one, which the search for cuts uses. The properties that a span contains another, or separates pins, are weights as
well.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from megaplan.spec.pattern import Span


class Weight(NamedTuple):
    """The weight of a span: `up[stop] − down[start]`, both rising with the layer. For a plain sum over layers both are one sequence."""

    up: Sequence[int]
    down: Sequence[int]

    def of(self, span: Span) -> int:
        """Weight of a span."""
        return self.up[span[1]] - self.down[span[0]]


class SpanSum(NamedTuple):
    """The weights of several slots' spans, and the limit of their sum."""

    weights: tuple[Weight, ...]
    most: int

    def excess(self, spans: Sequence[Span]) -> int:
        """The weight of the spans beyond the limit; negative if they weigh less."""
        return sum([weight.of(span) for weight, span in zip(self.weights, spans, strict=True)]) - self.most


def layer_weight(layers: Sequence[int], first: int = 0, last: int = 0) -> Weight:
    """The sum over layers; a span at either end of the model also weighs `first` or `last`."""
    before = [0, *(first + size for size in accumulate(layers))]
    before[-1] += last
    return Weight(before, before)


@lru_cache(maxsize=4096)
def containment(num_layers: int, span: Span) -> Weight:
    """1 for a span of layers that contains this one, else 0 or less."""
    start, stop = span
    return Weight([int(layer >= stop) for layer in range(num_layers + 1)], [int(layer > start) for layer in range(num_layers + 1)])


def never_all(num_layers: int, spans: Sequence[Span]) -> SpanSum:
    """The limit that slots do not contain all these spans at the same time."""
    return SpanSum(tuple([containment(num_layers, span) for span in spans]), len(spans) - 1)


@lru_cache(maxsize=4096)
def pins_inside(num_layers: int, pins: tuple[int, ...]) -> Weight:
    """The number of pinned cuts inside a span."""
    layers, at = range(num_layers + 1), sorted(set(pins))
    return Weight([bisect_left(at, stop) for stop in layers], [bisect_right(at, start) for start in layers])


class EdgeWeight:
    """A weight between edges, the cuts that may be. An atom is a span between neighbouring edges."""

    def __init__(self, weight: Weight, edges: Sequence[int]) -> None:
        self.up, self.down = [weight.up[edge] for edge in edges], [weight.down[edge] for edge in edges]
        if weight.up is weight.down:
            self.down = self.up
        self._atoms = [after - before for before, after in zip(self.down, self.up[1:], strict=False)]
        self._values = sorted(set(self._atoms))
        self.smallest, self.largest = self._values[0], self._values[-1]  # weight of an atom
        self.whole = self.up[-1] - self.down[0]  # upper bound of the weight of a span
        self._masks: dict[int, int] = {}

    def atoms_within(self, most: int) -> int:
        """Atoms with at most this weight, as bits."""
        num_values = bisect_right(self._values, most)
        if num_values not in self._masks:
            bits = ["1" if weight <= most else "0" for weight in reversed(self._atoms)]
            self._masks[num_values] = int("".join(bits), 2)
        return self._masks[num_values]


class EdgeWeights:
    """Weights between the same edges, each computed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Weight, EdgeWeight]] = {}

    def of(self, weight: Weight, edges: Sequence[int]) -> EdgeWeight:
        """A weight between edges, which are the same in each call."""
        key = id(weight.up), id(weight.down)
        known = self._made.get(key)
        if known is None:
            known = self._made[key] = weight, EdgeWeight(weight, edges)  # kept together with the weight, so that its id is not reused
        return known[1]
