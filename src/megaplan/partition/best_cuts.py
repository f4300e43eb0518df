"""`weighted`, objective bottleneck: cuts whose largest slot, or rank of a V, is the smallest possible, exactly. All costs are integers.

Bisection over a limit (`cut_search`) gives the bottleneck and refutes every smaller value. Optima are many. Among them: fewest cuts moved
against the baseline, then the smallest second-largest part (with multiplicity: two equal largest parts have it at the bottleneck itself),
then the lexicographically smallest cuts. All three are searched for exactly, by the same sets of pairs with what they use beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megaplan.partition.constraints import Constraints
from megaplan.partition.cut_search import CutSearch, Pairs
from megaplan.partition.limits import EdgeWeights, SpanSum
from megaplan.partition.values import Balance, StackCosts

Used = tuple[int, int]
"""Cuts moved against the baseline, and parts above the second-largest limit: none or one."""
Table = dict[Used, Pairs]
"""Pairs before a part, by what is used from there inward, both cuts of the pair included."""
Stops = dict[Used, int]
"""Stops before a part whose start is known, as bits, by what is used outside of it, the pair's own cuts left out."""


def balance(
    costs: StackCosts,
    num_slots: int,
    constraints: Constraints | None = None,
    *,
    folded: bool = False,
    limits: Sequence[Sequence[SpanSum]] | None = None,
    baseline: Sequence[int] | None = None,
    weights: EdgeWeights | None = None,
    most: int | None = None,
) -> Balance | None:
    """The best cuts under the constraints; no slot is empty.

    Args:
        costs: Costs of layers and ends.
        num_slots: pp · vpp.
        constraints: Forbidden and pinned cuts, layers that stay together.
        folded: True for V placement, where the two slots of a rank count together.
        limits: For each slot, or each rank of a V, the sums that its spans keep.
        baseline: num_slots − 1 cuts; ties go to the solution that keeps most of them in their place.
        weights: Weights of earlier calls with the same layers and constraints.
        most: The largest cost of a slot, or rank, that is of use; None for any.

    Returns:
        The cuts and the cost of their largest slot, or rank; None if the limits leave no split, or none of use.

    Raises:
        MegaplanError: MP327 … MP330 if the constraints leave no split, whatever the limits.
        ValueError: If the baseline has another number of cuts.
    """
    rules = constraints or Constraints()
    rules.check(len(costs.layers), num_slots)
    if baseline is not None and len(baseline) != num_slots - 1:
        raise ValueError(f"the baseline has {len(baseline)} cuts, and {num_slots} slots have {num_slots - 1}")
    search = CutSearch(costs, num_slots, rules, limits, folded=folded, weights=weights)
    low, high = search.lower_bound(), search.total if most is None else min(search.total, most)
    if low > high or ((most is not None or not folded) and not search.feasible(high)):
        return None
    value = search.smallest(low, high, search.feasible)
    return None if value is None else Balance(_TieBreak(search, value, baseline).cuts(), value)


class _TieBreak:
    """Chooses among the cuts that attain the bottleneck."""

    def __init__(self, search: CutSearch, value: int, baseline: Sequence[int] | None) -> None:
        self._search, self._value, self._most_moved = search, value, 0
        self._kept: list[tuple[int, int]] | None = None  # of the baseline, before each part: start and stop; -1 where it is not allowed
        if baseline is not None:
            self._kept = self._pairs_of([search.position(cut) for cut in baseline])
            self._most_moved = self._fewest_moved()
        if self._most_moved == search.num_slots - 1:  # every cut moves: the baseline decides nothing
            self._kept, self._most_moved = None, 0

    def cuts(self) -> tuple[int, ...]:
        """The one solution that all rules leave."""
        search, second = self._search, 0
        if search.num_parts > 1:
            # The parts beside the largest share what it leaves.
            low = max(0, -(-(search.total - self._value) // (search.num_parts - 1)))
            found = search.smallest(low, self._value, self._levels_out)
            assert found is not None, "a solution exists"
            second = found
        return self._in_order(self._tables(second), second)

    def _pairs_of(self, cuts: list[int]) -> list[tuple[int, int]]:
        number, end = self._search.num_parts, self._search.end
        if not self._search.folded:
            return [(0, end), *[(0, stop) for stop in reversed(cuts)], (0, 0)]
        return [(0, end), *zip(cuts[: number - 1], reversed(cuts[number:]), strict=True), (cuts[number - 1], cuts[number - 1])]

    def _fewest_moved(self) -> int:
        """Found with few moves allowed at first: what takes more of them is then not looked at."""
        while not (outermost := self._tables(self._value)[0]):
            self._most_moved = 2 * self._most_moved + 1
        return min(moved for moved, _ in outermost)

    def _levels_out(self, second: int) -> bool:
        """True if all parts but one can stay within a limit; later searches of a V look only at what can then be."""
        search, tables = self._search, self._tables(second)
        if not tables[0] or not search.folded:
            return bool(tables[0])
        within, level, large = [], {0: 1 << search.end}, Pairs()  # large: one part outside exceeds it
        for part, inner in enumerate(tables[1:]):
            within.append(_union((level, large)))
            none, one = _within(inner, 0), _within(inner, 1)
            exceeds = search.after_part(part, level, self._value, none)
            large = _union((search.after_part(part, large, second, none), exceeds))
            level = search.after_part(part, level, second, one)
        search.keep_within([*within, _union((level, large))])
        return True

    def _tables(self, second: int) -> list[Table]:
        """Before each part, and at the centre: the pairs that the parts inside can fill when at most one of them exceeds `second`."""
        search = self._search
        tables = [self._counted(search.num_parts, {(0, 0): search.centre()})]
        for part in reversed(range(search.num_parts)):
            found: dict[Used, list[Pairs]] = {}
            for (moved, exceeding), inside in tables[-1].items():
                for exceeds, limit in self._choices(exceeding, second):
                    # Outside, one part may be the large one if none is from here on.
                    outside = part * second if exceeds or not part else (part - 1) * second + self._value
                    found.setdefault((moved, exceeds), []).append(search.before_part(part, inside, limit, outside))
            tables.append(self._counted(part, {used: _union(pairs) for used, pairs in found.items()}))
        return tables[::-1]

    def _choices(self, exceeding: int, second: int) -> Sequence[tuple[int, int]]:
        """How many parts then exceed the second-largest limit, and the limit of the next one."""
        if exceeding or second == self._value:
            return ((exceeding, second),)
        return (0, second), (1, self._value)

    def _counted(self, part: int, table: Table) -> Table:
        """The pairs before a part with their own cuts counted, where there are no more than may be; each where it uses the least."""
        if self._kept is not None:
            counted: dict[Used, list[Pairs]] = {}
            for (moved, exceeding), pairs in table.items():
                for start, stops in pairs.items():
                    for moves, kept in self._moves(part, start, moved):
                        if stops & kept:
                            counted.setdefault((moves, exceeding), []).append({start: stops & kept})
            table = {used: _union(pairs) for used, pairs in counted.items()}
        found, seen = Table(), (Pairs(), Pairs())
        for used in sorted(table):
            known = seen[used[1]]
            fresh = {start: new for start, stops in table[used].items() if (new := stops & ~known.get(start, 0))}
            if fresh:
                found[used] = fresh
                for each in seen[used[1] :]:
                    _add(each, fresh)
        return found

    def _moves(self, part: int, start: int, moved: int) -> list[tuple[int, int]]:
        """For a start before a part: cuts moved with those of the pair, and the stops for which it is that many, if it may be."""
        if self._kept is None:
            return [(moved, -1)]
        own_start, own_stop = self._kept[part]
        moved += start != own_start
        if part == self._search.num_parts:  # start and stop are one position
            found = [(moved, -1)]
        else:
            kept = 1 << own_stop if own_stop >= 0 else 0
            found = [(moved, kept), (moved + 1, ~kept)]
        return [(moves, stops) for moves, stops in found if moves <= self._most_moved]

    def _in_order(self, tables: list[Table], second: int) -> tuple[int, ...]:
        """Smallest cut first: the starts from outside in, the centre, then the stops from inside out."""
        search = self._search
        start, reached = 0, {(0, 0): 1 << search.end}
        starts, steps = [0], [reached]
        for part in range(search.num_parts):
            start, reached = self._next_start(part, start, reached, tables[part + 1], second)
            starts.append(start)
            steps.append(reached)
        stops, used = [start], (self._moves(search.num_parts, start, 0)[0][0], 0)
        for part in reversed(range(1, search.num_parts)):
            stop, used = self._next_stop(part, (starts[part], starts[part + 1]), (steps[part], stops[-1]), used, second)
            stops.append(stop)
        return tuple(search.edges[position] for position in (*(starts[1:] if search.folded else ()), *stops[1:]))

    def _next_start(self, part: int, start: int, reached: Stops, inner: Table, second: int) -> tuple[int, Stops]:
        """The smallest position that the part's front span may stop at, and the stops then reached."""
        search, begins = self._search, [0]
        if search.folded:
            begins = sorted({begin for pairs in inner.values() for begin in pairs if begin > start})
        for inner_start in begins:
            found: Stops = {}
            for (before, exceeding), all_stops in reached.items():
                for moved, kept in self._moves(part, start, before):
                    stops = all_stops & kept
                    for exceeds, limit in self._choices(exceeding, second) if stops else ():
                        wanted = 0
                        for (rest, beside), pairs in inner.items():
                            if moved + rest <= self._most_moved and exceeds + beside <= 1:
                                wanted |= pairs.get(inner_start, 0)
                        if wanted and (got := search.inward(part, (start, inner_start), stops, limit) & wanted):
                            found[moved, exceeds] = found.get((moved, exceeds), 0) | got
            if found:
                return inner_start, found
        raise AssertionError("a solution exists")

    def _next_stop(self, part: int, starts: tuple[int, int], stops: tuple[Stops, int], used: Used, second: int) -> tuple[int, Used]:
        """The smallest stop before a part from which it gets to an inner stop, and what is then used from there inward."""
        (reached, inner_stop), (inside, exceeding), found = stops, used, []
        for exceeds, limit in self._choices(exceeding, second):
            got = self._search.outward(part, starts, 1 << inner_stop, limit)
            for (outside, beside), bits in reached.items():
                for moved, kept in self._moves(part, starts[0], inside + outside) if exceeds + beside <= 1 else ():
                    if here := got & bits & kept:
                        found.append(((here & -here).bit_length() - 1, exceeds, moved - outside))
        stop, exceeds, moved = min(found)
        return stop, (moved, exceeds)


def _within(table: Table, exceeding: int) -> Pairs:
    """All pairs for which no more parts exceed the second-largest limit."""
    return _union(pairs for (_, each), pairs in table.items() if each <= exceeding)


def _union(tables: Iterable[Pairs]) -> Pairs:
    found = Pairs()
    for pairs in tables:
        _add(found, pairs)
    return found


def _add(found: Pairs, pairs: Pairs) -> None:
    for start, stops in pairs.items():
        found[start] = found.get(start, 0) | stops
