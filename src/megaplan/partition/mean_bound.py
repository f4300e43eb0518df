"""A bound on the largest of several sums over slots, for all cuts: where the chunks of a rank are coupled and no exact search is known.

The largest sum is at least any weighted mean of all of them, and a mean is a sum over slots, which is smallest for cuts that one walk over
the slots finds. The weights are those of fictitious play: each turn the sum that is largest for the last cuts gains one. All integers, so
that the bound is the same everywhere.

Source: G. W. Brown, Iterative solution of games by fictitious play, 1951.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import NamedTuple

from megaplan.partition.constraints import Constraints

TURNS, FEWEST_TURNS = 96, 8
MAX_WORK = 400_000
"""Places of slots that all turns look at: deep stacks get fewer turns, and a bound that is as sound but smaller."""


class SlotSum(NamedTuple):
    """A sum over slots.

    Attributes:
        before: For each slot that counts, the weight of all layers before each one.
        rest: Added, whatever the cuts.
    """

    before: Mapping[int, Sequence[int]]
    rest: int

    def of(self, edges: Sequence[int]) -> int:
        """Its value for cuts, given with both ends of the model."""
        return self.rest + sum(at[edges[slot + 1]] - at[edges[slot]] for slot, at in self.before.items())


def mean_bound(sums: Sequence[SlotSum], num_slots: int, num_layers: int, rules: Constraints) -> int:
    """No cuts under the constraints have a smaller largest sum."""
    edges, pins = (0, *rules.allowed_cuts(num_layers), num_layers), frozenset(rules.pin)
    nothing = [0] * (num_layers + 1)
    mixed, rest, best = [nothing] * num_slots, 0, None
    turns = min(TURNS, max(FEWEST_TURNS, MAX_WORK // (num_slots * len(edges))))
    for turn in range(turns + len(sums)):
        if turn < len(sums):
            chosen = sums[turn]
        else:
            value, cuts = _shortest(mixed, edges, pins)
            bound = -(-(value + rest) // turn)
            best = bound if best is None else max(best, bound)
            chosen = max(sums, key=lambda one: one.of(cuts))
        rest += chosen.rest
        for slot, before in chosen.before.items():
            mixed[slot] = list(map(add, mixed[slot], before))
    if best is None:
        raise AssertionError("there is a turn")
    return best


def _shortest(weights: Sequence[Sequence[int]], edges: Sequence[int], pins: frozenset[int]) -> tuple[int, list[int]]:
    """The smallest sum over all slots, and the cuts that have it, with both ends."""
    reached: list[int | None] = [0, *[None] * (len(edges) - 1)]
    table = []
    for before in weights:
        found: list[int | None] = []
        came_from: list[int] = []
        least: tuple[int, int] | None = None  # of the slots up to a position, less what lies before it; and the position
        for position, edge in enumerate(edges):
            found.append(None if least is None else least[0] + before[edge])
            came_from.append(-1 if least is None else least[1])
            if edge in pins:
                least = None
            value = reached[position]
            if value is not None and (least is None or value - before[edge] < least[0]):
                least = value - before[edge], position
        table.append(came_from)
        reached = found
    position, cuts, total = len(edges) - 1, [edges[-1]], reached[-1]
    if total is None:
        raise AssertionError("the constraints leave a split")
    for came_from in reversed(table):
        position = came_from[position]
        cuts.append(edges[position])
    return total, cuts[::-1]
