"""`weighted` for V placement: cuts whose largest rank sum is the smallest possible, exactly. Rank i owns slots i and 2P − 1 − i.

Method. Ranks take layers from outside in: before rank i, [start, stop) is left, and it takes a span from either end. For a limit, the pairs
(start, stop) that ranks i … P − 1 can fill within it are computed from the innermost rank outwards: for each start the set of stops, as the
bits of one integer. Positions are indices of edges, the cuts that may be. For one first span and a set of inner stops, the stops that rank
i may have are told by the *furthest* one from every inner stop, because a part of an allowed span is allowed.

All pairs are kept. (Keeping for each start the stop that is furthest in would miss solutions: no slot may be empty, so a rank that has gone
ahead can be left with a layer that only an earlier rank had room for.)

The pairs are few where they matter: the ranks outside cannot take more than i times the limit, nor those inside more than P − i times, so
at a limit near the optimum the start nearly settles the stop.

Ties go as in `weighted`: fewest cuts moved against the baseline, smallest second-largest rank sum, lexicographically smallest cuts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import gcd

from megaplan.partition.constraints import Constraints
from megaplan.partition.limits import EdgeWeight, PairLimits, Weight, layer_weight
from megaplan.partition.values import StackCosts

Pairs = dict[int, int]
"""For each start the set of stops, as bits."""


class Fold:
    """A stack between edges, with what each rank may hold."""

    def __init__(self, costs: StackCosts, num_ranks: int, constraints: Constraints, limits: Sequence[PairLimits] | None) -> None:
        num_layers = len(costs.layers)
        self.num_ranks = num_ranks
        self.edges = (0, *constraints.allowed_cuts(num_layers), num_layers)
        self.end = len(self.edges) - 1
        self.cost = EdgeWeight(layer_weight(costs.layers, costs.first, costs.last), self.edges)
        self.before = self.cost.up
        self.total = self.before[-1]
        self.unit = gcd(*(after - before for before, after in zip(self.before, self.before[1:], strict=False))) or 1
        self._limits = _rank_limits(self.edges, limits or (PairLimits(),) * num_ranks)
        pins = set(constraints.pin)
        self._pinned = [edge in pins for edge in self.edges]
        self._next_pin, self._last_pin = [self.end] * (self.end + 1), [0] * (self.end + 1)
        for position in range(1, self.end + 1):
            self._last_pin[position] = position - 1 if self._pinned[position - 1] else self._last_pin[position - 1]
        for position in range(self.end - 1, -1, -1):
            self._next_pin[position] = position + 1 if self._pinned[position + 1] else self._next_pin[position + 1]
        self.keep_within(_everywhere(num_ranks, self.end))

    def limit(self, limits: Sequence[PairLimits]) -> None:
        """Put other limits in place of those there were; none may be wider, for what has been ruled out stays so."""
        self._limits = _rank_limits(self.edges, limits)

    def position(self, cut: int) -> int | None:
        """Index of a cut among the edges; None if it is not allowed."""
        index = bisect_left(self.edges, cut)
        return index if self.edges[index] == cut else None

    def lower_bound(self) -> int:
        """No largest rank sum is below it: an even share, and what one rank cannot avoid."""
        cost = self.before
        ends = cost[1] + cost[-1] - cost[-2]  # the outermost rank has both ends
        heaviest = self.cost.largest + self.cost.smallest
        return max(-(-self.total // self.num_ranks), ends, heaviest)

    def outward(self, rank: int, span: tuple[int, int], targets: int, limit: int) -> int:
        """The stops from which the rank can get to one of the targets, its inner stops, when its first span is given."""
        rooms = self._rooms(rank, span, limit)
        if rooms is None:
            return 0
        atoms, spaces, excluded = rooms
        found, runs = (targets & atoms) << 1, targets & ~(targets >> 1)
        while runs:
            begin = runs.bit_length() - 1
            runs ^= 1 << begin
            furthest = self._next_pin[begin]
            for up, down, space in spaces:
                furthest = min(furthest, bisect_right(up, down[begin] + space) - 1)
            for since, behind in excluded:
                if begin < behind:
                    furthest = min(furthest, since - 1)
            if furthest > begin:
                found |= (2 << furthest) - (2 << begin)
        return found

    def inward(self, rank: int, span: tuple[int, int], stops: int, limit: int) -> int:
        """The inner stops that the rank can get to from one of the stops, when its first span is given: `outward` the other way."""
        rooms = self._rooms(rank, span, limit)
        if rooms is None:
            return 0
        atoms, spaces, excluded = rooms
        found, runs = (stops >> 1) & atoms, stops & ~(stops << 1)
        while runs:
            end = (runs & -runs).bit_length() - 1
            runs &= runs - 1
            nearest = self._last_pin[end]
            for up, down, space in spaces:
                nearest = max(nearest, bisect_left(down, up[end] - space))
            for since, behind in excluded:
                if end >= since:
                    nearest = max(nearest, behind)
            if nearest < end:
                found |= (1 << end) - (1 << nearest)
        return found

    def _rooms(self, rank: int, span: tuple[int, int], limit: int) -> _Rooms | None:
        """What a first span leaves to the second; None if it is too much itself."""
        (start, inner_start), before = span, self.before
        room = limit - (before[inner_start] - before[start])
        if room < 0 or self._last_pin[inner_start] > start:
            return None
        atoms, excluded = self.cost.atoms_within(room), []
        spaces: list[tuple[Sequence[int], Sequence[int], int]] = [(before, before, room)]
        for left, right, most in self._limits[rank].sums:
            space = most - (left.up[inner_start] - left.down[start])
            if space < 0:
                return None
            atoms &= right.atoms_within(space)
            spaces.append((right.up, right.down, space))
        for (since, behind), second in self._limits[rank].excluded:
            if inner_start >= since and start < behind:
                excluded.append(second)
                if second[0] == second[1]:
                    atoms &= ~(1 << (second[1] - 1))
        return atoms, spaces, excluded

    def before_rank(self, rank: int, inside: Pairs, limit: int, outside: int) -> Pairs:
        """The pairs before a rank, from those after it.

        Args:
            rank: The rank.
            inside: Pairs that the ranks inside can fill.
            limit: Of the rank's sum.
            outside: The most that the ranks outside can take.
        """
        before, found, mine, most_stop = self.before, Pairs(), self._within[rank], self.end - rank
        starts, sums = self._starts[rank], self._limits[rank].sums
        widest = bisect_right(before, outside - self.total + before[most_stop]) - 1
        for inner_start, targets in inside.items():
            first = max(self._last_pin[inner_start], bisect_left(before, before[inner_start] - limit + self.cost.smallest))
            for left, _, most in sums:
                first = max(first, bisect_left(left.down, left.up[inner_start] - most))
            for start in starts[bisect_left(starts, first) : bisect_right(starts, min(inner_start - 1, widest))]:
                least = bisect_left(before, self.total - outside + before[start])
                reached = (self.outward(rank, (start, inner_start), targets, limit) & mine[start]) >> least << least
                if reached:
                    found[start] = found.get(start, 0) | reached
        return found

    def after_rank(self, rank: int, outside: Pairs, limit: int, wanted: Pairs) -> Pairs:
        """Those of the wanted pairs after a rank that it can get to from pairs before it."""
        before, found, keys = self.before, Pairs(), sorted(wanted)
        for start, stops in outside.items():
            last = bisect_right(before, before[start] + limit - self.cost.smallest)
            for inner_start in keys[bisect_right(keys, start) : bisect_left(keys, last)]:
                if reached := self.inward(rank, (start, inner_start), stops, limit) & wanted[inner_start]:
                    found[inner_start] = found.get(inner_start, 0) | reached
        return found

    def centre(self) -> Pairs:
        """What lies inside the innermost rank: nothing, anywhere."""
        return self._within[self.num_ranks]

    def keep_within(self, within: list[Pairs]) -> None:
        """Look no further than these pairs, before each rank and at the centre."""
        self._within, self._starts = within, [sorted(pairs) for pairs in within]

    def feasible(self, limit: int) -> bool:
        """Whether all ranks can stay within the limit; if so, later searches look only at what can then be."""
        tables = [self.centre()]
        for rank in reversed(range(self.num_ranks)):
            tables.append(self.before_rank(rank, tables[-1], limit, rank * limit))
        if not tables[-1]:
            return False
        within, outside = [], tables[-1]
        for rank, inside in enumerate(reversed(tables[:-1])):
            within.append(outside)
            outside = self.after_rank(rank, outside, limit, inside)
        self.keep_within([*within, outside])
        return True


_Rooms = tuple[int, list[tuple[Sequence[int], Sequence[int], int]], list[tuple[int, int]]]
"""Atoms the second span may be, as bits; (up, down, the most it may weigh); and of what it may not contain, see `SlotReach`."""


def _everywhere(num_ranks: int, end: int) -> list[Pairs]:
    """Before each rank every pair that leaves each rank outside and inside an atom in each slot."""
    within: list[Pairs] = [{0: 1 << end}]
    for rank in range(1, num_ranks):
        stops = (2 << (end - rank)) - 1
        within.append(dict.fromkeys(range(rank, end - rank), stops))
    return [*within, {position: 1 << position for position in range(num_ranks, end - num_ranks + 1)}]


class _EdgePairLimits:
    """A rank's limits between edges."""

    __slots__ = ("excluded", "sums")

    def __init__(self, sums: list[tuple[EdgeWeight, EdgeWeight, int]], excluded: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        """`excluded`: of each span, the first position it may stop at, and the first behind its start (see `SlotReach`)."""
        self.sums, self.excluded = sums, excluded


def _rank_limits(edges: Sequence[int], limits: Sequence[PairLimits]) -> list[_EdgePairLimits]:
    made: dict[tuple[int, int], EdgeWeight] = {}

    def between(weight: Weight) -> EdgeWeight:
        key = id(weight.up), id(weight.down)
        return made.get(key) or made.setdefault(key, EdgeWeight(weight, edges))

    def ends(span: tuple[int, int]) -> tuple[int, int]:
        return bisect_left(edges, span[1]), bisect_right(edges, span[0])

    return [
        _EdgePairLimits(
            [(between(left), between(right), most) for left, right, most in limit.sums],
            [(ends(first), ends(second)) for first, second in limit.excluded],
        )
        for limit in limits
    ]
