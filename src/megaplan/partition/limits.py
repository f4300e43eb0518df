"""Limits on what slots may hold: sums over spans of layers, and spans that are known to be too much.

Both are monotone: what is within them still is when layers are taken from either end. So the spans that a slot may have before a given
cut are told by the longest of them, which is what both partitioners ask for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

Span = tuple[int, int]
"""Layers [start, stop)."""


class Weight(NamedTuple):
    """What a span weighs: `up[stop] − down[start]`, both rising with the layer. For a plain sum over layers the two are one sequence."""

    up: Sequence[int]
    down: Sequence[int]

    def of(self, span: Span) -> int:
        """Weight of a span."""
        return self.up[span[1]] - self.down[span[0]]


class SlotLimits(NamedTuple):
    """Limits of one slot.

    Attributes:
        sums: (weight, the most a span may weigh).
        excluded: No span of the slot contains one of these.
    """

    sums: tuple[tuple[Weight, int], ...] = ()
    excluded: tuple[Span, ...] = ()


class PairLimits(NamedTuple):
    """Limits of the two slots of a rank together.

    Attributes:
        sums: (weight of the first slot's span, weight of the second's, the most they may weigh together).
        excluded: The rank never has spans that contain both of one of these pairs.
    """

    sums: tuple[tuple[Weight, Weight, int], ...] = ()
    excluded: tuple[tuple[Span, Span], ...] = ()


def layer_weight(layers: Sequence[int], first: int = 0, last: int = 0) -> Weight:
    """The sum over layers; a span at either end of the model weighs `first` or `last` more."""
    before = [0, *(first + size for size in accumulate(layers))]
    before[-1] += last
    return Weight(before, before)


def slot_caps(layer_bytes: Sequence[int], cap_bytes: Sequence[int]) -> tuple[SlotLimits, ...]:
    """Limits of layers that weigh the same on every slot.

    Args:
        layer_bytes: Bytes of each layer.
        cap_bytes: The most a slot may hold, for each slot.
    """
    weight = layer_weight(layer_bytes)
    return tuple(SlotLimits(((weight, cap),)) for cap in cap_bytes)


class SlotReach:
    """A slot's limits between edges, the cuts that may be: which spans they leave."""

    def __init__(self, edges: Sequence[int], sums: Sequence[tuple[EdgeWeight, int]], excluded: Sequence[Span]) -> None:
        """`sums`: weights between these edges, and the most a span may weigh."""
        self._sums = [(weight.up, weight.down, most) for weight, most in sums]
        # Of an excluded span: a slot that stops at or after the one position starts at the other at the earliest.
        self._excluded = [(bisect_left(edges, stop), bisect_right(edges, start)) for start, stop in excluded]
        self.atoms = (1 << (len(edges) - 1)) - 1
        for weight, most in sums:
            self.atoms &= weight.atoms_within(most)
        for since, start in self._excluded:
            if since == start:
                self.atoms &= ~(1 << (start - 1))

    def start(self, stop: int) -> int:
        """Smallest position from which the slot may reach `stop`; `stop` or more if none does."""
        first = 0
        for up, down, most in self._sums:
            first = max(first, bisect_left(down, up[stop] - most))
        for since, start in self._excluded:
            if stop >= since:
                first = max(first, start)
        return first


class EdgeWeight:
    """A weight between edges."""

    def __init__(self, weight: Weight, edges: Sequence[int]) -> None:
        self.up, self.down = [weight.up[edge] for edge in edges], [weight.down[edge] for edge in edges]
        if weight.up is weight.down:
            self.down = self.up
        self._atoms = [after - before for before, after in zip(self.down, self.up[1:], strict=False)]
        self._values = sorted(set(self._atoms))
        self._masks: dict[int, int] = {}

    def atoms_within(self, most: int) -> int:
        """Spans between neighbouring edges that weigh no more, as bits."""
        num_values = bisect_right(self._values, most)
        if num_values not in self._masks:
            bits = ["1" if weight <= most else "0" for weight in reversed(self._atoms)]
            self._masks[num_values] = int("".join(bits), 2)
        return self._masks[num_values]

    @property
    def smallest(self) -> int:
        """Weight of the lightest of them."""
        return self._values[0]

    @property
    def largest(self) -> int:
        """Weight of the heaviest of them."""
        return self._values[-1]


class EdgeWeights:
    """Weights between the same edges, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Weight, EdgeWeight]] = {}

    def of(self, weight: Weight, edges: Sequence[int]) -> EdgeWeight:
        """A weight between edges, which are the same at each call."""
        key = id(weight.up), id(weight.down)
        known = self._made.get(key)
        if known is None:
            known = self._made[key] = weight, EdgeWeight(weight, edges)  # kept with it, so that its id stays its own
        return known[1]


def slot_reaches(edges: Sequence[int], limits: Sequence[SlotLimits], weights: EdgeWeights | None = None) -> list[SlotReach]:
    """The limits of every slot between edges; `weights` are those of an earlier call with these edges."""
    made = weights or EdgeWeights()
    return [SlotReach(edges, [(made.of(weight, edges), most) for weight, most in limit.sums], limit.excluded) for limit in limits]
