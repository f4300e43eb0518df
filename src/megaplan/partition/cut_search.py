"""Cuts within limits, for every placement: their existence, and the positions from which each part of the pipeline can be filled.

Costs and limits are compared by *part*: one slot, or in V placement the two slots of a rank, i and 2P − 1 − i. Parts take layers from
outside in. Before a part, the layers [start, stop) remain; a slot takes a span from the back, and a rank of a V takes one span from
each end. So parts run from
the last slot to the first, or from the outermost rank to the innermost; without a V the start is 0 throughout.

Method. For a limit, the pairs (start, stop) that a part and all inside it can fill are computed from the innermost part outwards: for each
start the set of stops, as the bits of one integer. Positions are indices of edges, the allowed cuts. For one front span and a set of inner
stops, the stops that a part may have follow from the *furthest* one for every inner stop, because every subspan of an allowed span is
allowed.

All pairs are kept. Keeping for each start the stop that is furthest in would miss solutions: no slot may be empty and limits differ by
part, so a part that takes more layers can leave a layer for which only another part had room.

Near the optimum, a V has few pairs: the ranks outside cannot take more than i times the limit, nor those inside more than P − i
times, so at a limit near the optimum the start nearly determines the stop.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations, takewhile

from megaplan.partition.constraints import Constraints
from megaplan.partition.limits import EdgeWeight, EdgeWeights, SpanSum, layer_weight, pins_inside
from megaplan.partition.values import StackCosts
from megaplan.spec.pattern import Span

Pairs = dict[int, int]
"""Set of stops for each start, as bits."""
_Rooms = tuple[int, list[tuple[list[int], list[int], int]]]
"""The atoms that a back span may contain, as bits, and (up, down, largest weight of the span)."""
NO_FRONT = (0, 0)
"""Front span of a slot."""


class CutSearch:
    """The search for cuts of a stack at given edges, with a limit for each part."""

    def __init__(
        self,
        costs: StackCosts,
        num_slots: int,
        rules: Constraints,
        limits: Sequence[Sequence[SpanSum]] | None = None,
        *,
        folded: bool = False,
        weights: EdgeWeights | None = None,
    ) -> None:
        """Limits are per slot, or per rank for a folded V; searches with the same edges may share `weights`."""
        num_layers = len(costs.layers)
        self.folded, self.num_slots, self.num_parts = folded, num_slots, num_slots // 2 if folded else num_slots
        self.edges = (0, *rules.allowed_cuts(num_layers), num_layers)
        self.end = len(self.edges) - 1
        self._weights = weights or EdgeWeights()
        self._cost = EdgeWeight(layer_weight(costs.layers, costs.first, costs.last), self.edges)
        self._before = self._cost.up
        self.total = self._before[-1]
        slots = self.num_slots // self.num_parts
        self._pins = [SpanSum((pins_inside(num_layers, rules.pin),) * slots, 0)] if rules.pin else []
        self.keep_within(self._everywhere() if folded else [])
        self.limit(limits)

    def limit(self, limits: Sequence[Sequence[SpanSum]] | None) -> None:
        """Replace the limits; none may be wider, because exclusions are kept."""
        found = ((),) * self.num_parts if limits is None else limits if self.folded else limits[::-1]
        edges, between, pins = self.edges, self._weights.of, self._pins
        self._sums = [[([between(weight, edges) for weight in each.weights], each.most) for each in (*own, *pins)] for own in found]
        self._rooms_of: dict[int, list[_Rooms]] = {}
        self._alone = None if self.folded else [self._slot_rooms(part) for part in range(self.num_parts)]

    @cached_property
    def span_costs(self) -> list[int]:
        """Costs that a span may have, ascending; a rank of a V has the cost of two spans."""
        return sorted({stop - start for start, stop in combinations(self._before, 2)})

    def position(self, cut: int) -> int:
        """Index of a cut among the edges; -1 if it is not allowed."""
        index = bisect_left(self.edges, cut)
        return index if index <= self.end and self.edges[index] == cut else -1

    def lower_bound(self) -> int:
        """Lower bound on the largest part: an even share, and costs that a part cannot avoid."""
        before, even = self._before, -(-self.total // self.num_parts)
        if not self.folded:
            return max(even, self._cost.largest)
        ends = before[1] + before[-1] - before[-2]  # the outermost rank has both
        return self._beyond(max(even, ends, self._cost.largest + self._cost.smallest) - 1, self.total)

    def smallest(self, low: int, high: int, holds: Callable[[int], bool]) -> int | None:
        """The smallest cost of a part from `low` to `high` for which a monotone condition holds.

        A limit is equivalent to the largest cost within it and to the smallest beyond it. For slots the condition holds at `high`. A V has
        no known `high`, and None is returned if no limit holds: its optimum is near `low`, where a test is cheap, so growing steps precede
        bisection.
        """
        if self.folded:
            low = probe = self._beyond(low - 1, high)
            step = max(1, low >> 10)
            while not holds(probe):
                if probe >= high:
                    return None
                low = self._beyond(probe, high)
                probe, step = max(low, min(probe + step, high)), 16 * step
            high = max(low, self._within_limit(probe))
        while low < high:
            middle = (low + high) // 2
            if holds(middle):
                high = max(low, self._within_limit(middle))
            else:
                low = self._beyond(middle, high)
        return high

    def _within_limit(self, limit: int) -> int:
        """An upper bound on the costs of a part within a limit."""
        before = self._before
        if self.folded:
            costs = self.span_costs
            least = takewhile(lambda cost: cost + cost <= limit, costs)
            return max([cost + costs[bisect_right(costs, limit - cost) - 1] for cost in least], default=limit)
        return max([before[bisect_right(before, begin + limit) - 1] - begin for begin in before])

    def _beyond(self, limit: int, high: int) -> int:
        """A lower bound on the costs of a part beyond a limit, up to `high`."""
        before = self._before
        if self.folded:
            costs = self.span_costs
            most = bisect_right(costs, limit // 2)  # the limit for the smaller span; above it, the smaller span alone suffices
            others = [(cost, bisect_right(costs, limit - cost)) for cost in costs[: most + 1]]
            return min([high, *[cost + costs[other] for cost, other in others if other < len(costs)]])
        above = (bisect_right(before, begin + limit) for begin in before)
        return min([high, *[before[stop] - begin for begin, stop in zip(before, above, strict=True) if stop <= self.end]])

    def outward(self, part: int, front: Span, targets: int, limit: int) -> int:
        """The stops from which a part reaches one of the targets, its inner stops, for a given front span."""
        rooms = self._rooms(part, front, limit) if targets else None
        if rooms is None:
            return 0
        atoms, spaces = rooms
        found, runs = (targets & atoms) << 1, targets & ~(targets >> 1)
        while runs:
            begin = runs.bit_length() - 1
            runs ^= 1 << begin
            furthest = self.end
            for up, down, space in spaces:
                reach = bisect_right(up, down[begin] + space) - 1
                if reach < furthest:  # noqa: PLR1730  (a call of min takes longer, millions of times)
                    furthest = reach
            if furthest > begin:
                found |= (2 << furthest) - (2 << begin)
        return found

    def inward(self, part: int, front: Span, stops: int, limit: int) -> int:
        """The inner stops that a part reaches from one of the stops, for a given front span: the inverse of `outward`."""
        rooms = self._rooms(part, front, limit) if stops else None
        if rooms is None:
            return 0
        atoms, spaces = rooms
        found, runs = (stops >> 1) & atoms, stops & ~(stops << 1)
        while runs:
            end = (runs & -runs).bit_length() - 1
            runs &= runs - 1
            nearest = 0
            for up, down, space in spaces:
                reach = bisect_left(down, up[end] - space)
                if reach > nearest:  # noqa: PLR1730
                    nearest = reach
            if nearest < end:
                found |= (1 << end) - (1 << nearest)
        return found

    def _rooms(self, part: int, front: Span, limit: int) -> _Rooms | None:
        """The limit that a front span leaves for the back one; None if the front span itself exceeds the limit."""
        before, cost = self._before, self._cost
        if self._alone is not None:
            of_limit = self._rooms_of.get(limit)
            if of_limit is None:
                within, own = cost.atoms_within(limit), (before, before, limit)
                of_limit = self._rooms_of[limit] = [(within & atoms, [own, *spaces]) for atoms, spaces in self._alone]
            return of_limit[part]
        start, inner_start = front
        room = limit - (before[inner_start] - before[start])
        if room < 0:
            return None
        atoms, spaces = cost.atoms_within(room), [(before, before, room)]
        for (first, second), most in self._sums[part]:
            space = most - (first.up[inner_start] - first.down[start])
            if space < 0:
                return None
            if space < second.whole:
                atoms &= second.atoms_within(space)
                spaces.append((second.up, second.down, space))
        return atoms, spaces

    def _slot_rooms(self, part: int) -> _Rooms:
        """Rooms of a slot, which has no front span."""
        atoms, spaces = -1, []
        for (weight,), most in self._sums[part]:
            atoms &= weight.atoms_within(most)
            spaces.append((weight.up, weight.down, most))
        return atoms, spaces

    def before_part(self, part: int, inside: Pairs, limit: int, outside: int) -> Pairs:
        """The pairs before a rank of a V, from those after it.

        Args:
            part: The rank.
            inside: Pairs that the ranks inside can fill.
            limit: Limit of the rank.
            outside: The most that the outer ranks can take.
        """
        mine, before, found, most_stop = self._within[part], self._before, Pairs(), self.end - part
        starts, sums = self._starts[part], self._sums[part]
        widest = bisect_right(before, outside - self.total + before[most_stop]) - 1
        for inner_start, targets in inside.items():
            first = bisect_left(before, before[inner_start] - limit + self._cost.smallest)
            for (front, _), most in sums:
                first = max(first, bisect_left(front.down, front.up[inner_start] - most))
            for start in starts[bisect_left(starts, first) : bisect_right(starts, min(inner_start - 1, widest))]:
                least = bisect_left(before, self.total - outside + before[start])
                known = found.get(start, 0)
                wanted = mine[start] >> least << least & ~known
                if wanted and (reached := self.outward(part, (start, inner_start), targets, limit) & wanted):
                    found[start] = known | reached
        return found

    def after_part(self, part: int, outside: Pairs, limit: int, wanted: Pairs) -> Pairs:
        """The wanted pairs after a part of a V that are reachable from the pairs before it."""
        before, found, keys = self._before, Pairs(), sorted(wanted)
        for start, stops in outside.items():
            last = bisect_right(before, before[start] + limit - self._cost.smallest)
            for inner_start in keys[bisect_right(keys, start) : bisect_left(keys, last)]:
                known = found.get(inner_start, 0)
                left = wanted[inner_start] & ~known
                if left and (reached := self.inward(part, (start, inner_start), stops, limit) & left):
                    found[inner_start] = known | reached
        return found

    def centre(self) -> Pairs:
        """The pairs inside the innermost rank of a V: no layer is left, at any position."""
        return self._within[-1]

    def keep_within(self, within: list[Pairs]) -> None:
        """Restrict the search to these pairs, before each part and at the centre."""
        self._within, self._starts = within, [sorted(pairs) for pairs in within]

    def _everywhere(self) -> list[Pairs]:
        """Pairs of cuts before each part of a V that leave every slot outside and inside at least one atom; and the centre."""
        number, end = self.num_parts, self.end
        inner = [dict.fromkeys(range(part, end - part), (2 << (end - part)) - 1) for part in range(1, number)]
        return [{0: 1 << end}, *inner, {position: 1 << position for position in range(number, end - number + 1)}]

    def feasible(self, limit: int) -> bool:
        """True if all parts can stay within the limit; later searches of a V then consider only pairs that can."""
        if not self.folded:
            reached = 1
            for part in reversed(range(self.num_parts)):
                reached = self.outward(part, NO_FRONT, reached, limit)
            return bool(reached >> self.end)
        tables = [self.centre()]
        for part in reversed(range(self.num_parts)):
            tables.append(self.before_part(part, tables[-1], limit, part * limit))
            if not tables[-1]:
                return False
        within, outside = [], tables[-1]
        for part, inside in enumerate(reversed(tables[:-1])):
            within.append(outside)
            outside = self.after_part(part, outside, limit, inside)
        self.keep_within([*within, outside])
        return True
