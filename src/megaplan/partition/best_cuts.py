"""`weighted`, objective bottleneck: cuts whose largest slot, or rank of a V, is the smallest possible, exactly. All costs are integers.

Bisection over a limit (`cut_search`) gives the bottleneck and refutes every smaller value. There are many optima. Among them the search
takes the one with the fewest cuts moved against the baseline, then with the smallest second-largest part (with multiplicity: if two parts
are the largest, it equals the bottleneck), then with the lexicographically smallest cuts. All three criteria are exact; they use the same
sets of pairs, extended by the numbers of moved cuts and of large parts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from operator import or_

from megaplan.partition.constraints import Constraints
from megaplan.partition.cut_search import NO_FRONT, CutSearch, Pairs
from megaplan.partition.limits import EdgeWeights, SpanSum
from megaplan.partition.values import Balance, StackCosts


def climb(
    cuts: tuple[int, ...],
    rules: Constraints,
    num_layers: int,
    gains: Callable[[tuple[int, ...]], bool | None],
    ended: Callable[[], bool],
    *,
    pairs: bool = True,
    places: Sequence[int] = (1,),
) -> tuple[int, ...]:
    """Move cuts repeatedly to the first neighbour that gains more.

    Args:
        cuts: Cuts that keep the constraints.
        rules: Constraints.
        num_layers: Layers of the model.
        gains: Returns True if cuts are better than the best so far, which they then replace, and None to end the climb.
        ended: True if the climb ends; called before the neighbours of each best cuts.
        pairs: See `neighbours`.
        places: See `neighbours`.
    """
    positions, pins = rules.allowed_cuts(num_layers), frozenset(rules.pin)
    index = {cut: position for position, cut in enumerate(positions)}
    best = cuts
    found: bool | None = True
    while found and not ended():
        found = False
        for moved in neighbours([index[cut] for cut in best], len(positions), pairs=pairs, places=places):
            tried = tuple([positions[position] for position in moved])
            if pins.issubset(tried) and (found := gains(tried)) is not False:
                best = tried if found else best
                break
    return best


def neighbours(cuts: Sequence[int], num_positions: int, *, pairs: bool = True, places: Sequence[int] = (1,)) -> Iterator[tuple[int, ...]]:
    """Neighbours of cuts: with one cut moved, then with a run of adjacent cuts, then with two cuts.

    Each moves by the given numbers of positions in either direction.

    Args:
        cuts: Ascending positions from 0 to num_positions − 1.
        num_positions: Number of positions for a cut.
        pairs: True if two cuts that are not a run move too.
        places: Positions by which a cut may move.
    """
    number = len(cuts)
    for size in range(1, number + 1):
        for first in range(number - size + 1):
            for by in (sign * place for place in places for sign in (-1, 1)):
                yield from _legal([cut + by * (first <= index < first + size) for index, cut in enumerate(cuts)], num_positions)
    for one, other in combinations(range(number if pairs else 0), 2):
        for far_one, far_other in product(places, repeat=2):
            for by_one, by_other in ((-far_one, far_other), (far_one, -far_other), (-far_one, -far_other), (far_one, far_other)):
                if by_one == by_other and other == one + 1:
                    continue  # a run
                moves = {one: by_one, other: by_other}
                yield from _legal([cut + moves.get(index, 0) for index, cut in enumerate(cuts)], num_positions)


def _legal(cuts: list[int], num_positions: int) -> Iterator[tuple[int, ...]]:
    if cuts[0] >= 0 and cuts[-1] < num_positions and all(a < b for a, b in pairwise(cuts)):
        yield tuple(cuts)


Used = tuple[int, int]
"""Used allowance so far: the number of cuts moved against the baseline, and the number of parts above the second-largest limit (0 or 1)."""
Table = dict[Used, Pairs]
"""Pairs before a part, by the allowance used from there inward, including both cuts of the pair."""
Stops = dict[Used, int]
"""Possible stops before a part with a known start, as bits, by the number of moved cuts outside the part, without the pair's own cuts."""


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
        folded: True for V placement, in which the two slots of a rank count as one part.
        limits: Sums that the spans of each slot, or each rank of a V, must keep.
        baseline: num_slots − 1 cuts; ties are decided by the number of these cuts that a solution keeps.
        weights: Weights of earlier calls with the same layers and constraints.
        most: The largest acceptable cost of a slot, or rank; None for any.

    Returns:
        The cuts and the cost of their largest slot, or rank; None if the limits leave no split, or none that is acceptable.

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
        self._levelled: list[Table] = []  # the pairs below the smallest limit found that all parts but one can keep
        self._kept: list[tuple[int, int]] | None = None  # start and stop of the baseline before each part; -1 if it is not allowed
        if baseline is not None:
            self._kept = self._pairs_of([search.position(cut) for cut in baseline])
            self._most_moved = self._fewest_moved()
        if self._most_moved == search.num_slots - 1:  # every cut moves: the baseline decides nothing
            self._kept, self._most_moved = None, 0

    def cuts(self) -> tuple[int, ...]:
        """The one solution that satisfies all rules."""
        search, second = self._search, 0
        if search.num_parts > 1:
            # The other parts share the rest of the cost after the largest one.
            low = max(0, -(-(search.total - self._value) // (search.num_parts - 1)))
            found = search.smallest(low, self._value, self._levels_out)
            assert found is not None, "a solution exists"
            second = found
        return self._in_order(self._levelled or self._tables(second), second) if search.folded else self._slots_in_order(second)

    def _pairs_of(self, cuts: list[int]) -> list[tuple[int, int]]:
        number, end = self._search.num_parts, self._search.end
        if not self._search.folded:
            return [(0, end), *[(0, stop) for stop in reversed(cuts)], (0, 0)]
        return [(0, end), *zip(cuts[: number - 1], reversed(cuts[number:]), strict=True), (cuts[number - 1], cuts[number - 1])]

    def _fewest_moved(self) -> int:
        search, number = self._search, self._search.num_slots
        self._most_moved = number - 1
        if search.folded:
            return min([moved for moved, _ in self._tables(self._value, any_will_do=True)[0]])
        below, own = [0] * number, [self._moves(part + 1, 0, 0)[0][1] for part in range(number)]
        for moved in range(number):  # a level of slots only reads the level below
            stops, level = 1 << search.end, []
            for part, kept in enumerate(own):
                level.append(search.inward(part, NO_FRONT, stops, self._value))
                stops = level[part] & kept | below[part]
            if stops & 1:
                return moved
            below = level
        raise AssertionError("a solution moves at most every cut")

    def _slot_tables(self, second: int) -> list[tuple[list[int], list[int]]]:
        """Tables before each slot, and at the centre: stops reachable from outside with no slot above `second`, and with at most one.

        Both are counted by the cuts that may move, including those of the stops.
        """
        reach, value = self._search.inward, self._value
        none = one = [1 << self._search.end] * (self._most_moved + 1)
        tables = [(none, one)]
        for part in range(self._search.num_parts):
            large = [reach(part, NO_FRONT, stops, value) for stops in none] if second < value else []
            none = [reach(part, NO_FRONT, stops, second) for stops in none]
            one = [reach(part, NO_FRONT, stops, second) | more for stops, more in zip(one, large, strict=True)] if large else none
            if self._kept is not None:
                kept = self._moves(part + 1, 0, 0)[0][1]
                none, one = ([stops & kept | below for stops, below in zip(each, [0, *each], strict=False)] for each in (none, one))
            tables.append((none, one))
        return tables

    def _slots_in_order(self, second: int) -> tuple[int, ...]:
        """The cuts in ascending order, chosen among those that are reachable from outside with the remaining allowance."""
        search, tables, cuts = self._search, self._slot_tables(second), []
        at, moved, exceeding = 0, self._most_moved, 0
        for part in reversed(range(1, search.num_parts)):
            found = []
            for exceeds, limit in self._choices(exceeding, second):
                if got := search.outward(part, NO_FRONT, 1 << at, limit) & tables[part][1 - exceeds][moved]:
                    found.append(((got & -got).bit_length() - 1, exceeds))
            at, exceeding = min(found)
            moved -= not self._moves(part, 0, 0)[0][1] >> at & 1
            cuts.append(search.edges[at])
        return tuple(cuts)

    def _levels_out(self, second: int) -> bool:
        """True if all parts except one can stay within a limit; later searches of a V then consider only pairs that can."""
        search = self._search
        if not search.folded:
            return bool(self._slot_tables(second)[-1][1][-1] & 1)
        tables = self._tables(second)
        if not tables[0]:
            return False
        self._levelled = tables
        within, level, large = [], {0: 1 << search.end}, Pairs()  # large: a single part outside exceeds it
        for part, inner in enumerate(tables[1:]):
            within.append(_union((level, large)))
            none, one = (_union(pairs for (_, each), pairs in inner.items() if each <= exceeding) for exceeding in (0, 1))
            exceeds = search.after_part(part, level, self._value, none)
            large = _union((search.after_part(part, large, second, none), exceeds))
            level = search.after_part(part, level, second, one)
        search.keep_within([*within, _union((level, large))])
        return True

    def _tables(self, second: int, *, any_will_do: bool = False) -> list[Table]:
        """Tables before each rank of a V, and at the centre: pairs that the inner ranks can fill if at most one exceeds `second`.

        Each pair is stored with the smallest allowance that it uses. With `any_will_do`, pairs that use more than a complete solution are
        omitted.
        """
        search, number = self._search, self._search.num_parts
        tables, found = ([Table() for _ in range(number + 1)] for _ in range(2))
        seen = [(Pairs(), Pairs()) for _ in range(number + 1)]
        choices = self._choices(0, second), self._choices(1, second)
        self._count(found[number], number, search.centre(), (0, 0))
        for moved, exceeding in product(range(self._most_moved + 1), (0, 1)):
            used = moved, exceeding
            for part in range(number, -1, -1):
                fresh, known = found[part].get(used), seen[part][exceeding]
                if fresh and known:
                    fresh = {start: left for start, stops in fresh.items() if (left := stops & ~known.get(start, 0))}
                if not fresh:
                    continue
                tables[part][used] = fresh
                for each in seen[part][exceeding:]:
                    _add(each, fresh)
                for exceeds, limit in choices[exceeding] if part else ():
                    # One part outside may be the large one if no part from here on is.
                    outside = (part - 1) * second if exceeds or part == 1 else (part - 2) * second + self._value
                    self._count(found[part - 1], part - 1, search.before_part(part - 1, fresh, limit, outside), (moved, exceeds))
            if any_will_do and tables[0]:
                break
        return tables

    def _choices(self, exceeding: int, second: int) -> Sequence[tuple[int, int]]:
        """The choices: the number of parts that exceed the second-largest limit, and the limit of the next part."""
        if exceeding or second == self._value:
            return ((exceeding, second),)
        return (0, second), (1, self._value)

    def _count(self, table: Table, part: int, pairs: Pairs, used: Used) -> None:
        """Add the pairs before a part, with their own cuts counted, unless too many cuts are moved."""
        if self._kept is None:
            _add(table.setdefault(used, {}), pairs)
            return
        exceeding = used[1]
        for start, stops in pairs.items():
            for moved, kept in self._moves(part, start, used[0]):
                if here := stops & kept:
                    of_used = table.get((moved, exceeding))
                    if of_used is None:
                        table[moved, exceeding] = {start: here}
                    else:
                        of_used[start] = of_used.get(start, 0) | here

    def _moves(self, part: int, start: int, moved: int) -> Sequence[tuple[int, int]]:
        """Numbers of moved cuts after a start before a part, this pair's included, each with its stops, if the number is allowed."""
        if self._kept is None:
            return ((moved, -1),)
        own_start, own_stop = self._kept[part]
        moved += start != own_start
        kept = -1 if part == self._search.num_parts else 1 << own_stop if own_stop >= 0 else 0  # inside, start and stop are one position
        return ((moved, kept), (moved + 1, ~kept))[: max(0, self._most_moved - moved + 1)]

    def _in_order(self, tables: list[Table], second: int) -> tuple[int, ...]:
        """The cuts of a V, chosen in ascending order: the starts from outside in, the centre, then the stops from inside out."""
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
        return tuple(search.edges[position] for position in (*starts[1:], *stops[1:]))

    def _next_start(self, part: int, start: int, reached: Stops, inner: Table, second: int) -> tuple[int, Stops]:
        """The smallest allowed stop of the rank's front span, and the stops that are then reached."""
        for inner_start in sorted({begin for pairs in inner.values() for begin in pairs if begin > start}):
            wanted, found = ([0] * (self._most_moved + 1), [0] * (self._most_moved + 1)), Stops()
            for (moved, exceeding), pairs in inner.items():
                for by_moved in wanted[exceeding:]:
                    by_moved[moved] |= pairs.get(inner_start, 0)
            inside = [list(accumulate(by_moved, or_)) for by_moved in wanted]
            for (before, exceeding), stops in reached.items():
                for moved, kept in self._moves(part, start, before):
                    for exceeds, limit in self._choices(exceeding, second) if stops & kept else ():
                        targets = inside[1 - exceeds][self._most_moved - moved]
                        if targets and (got := self._search.inward(part, (start, inner_start), stops & kept, limit) & targets):
                            found[moved, exceeds] = found.get((moved, exceeds), 0) | got
            if found:
                return inner_start, found
        raise AssertionError("a solution exists")

    def _next_stop(self, part: int, starts: tuple[int, int], stops: tuple[Stops, int], used: Used, second: int) -> tuple[int, Used]:
        """The smallest stop before a part from which the part reaches an inner stop, and the allowance used from there inward."""
        (reached, inner_stop), (inside, exceeding), found = stops, used, []
        for exceeds, limit in self._choices(exceeding, second):
            got = self._search.outward(part, starts, 1 << inner_stop, limit)
            for (outside, outer_used), bits in reached.items():
                for moved, kept in self._moves(part, starts[0], inside + outside) if exceeds + outer_used <= 1 else ():
                    if here := got & bits & kept:
                        found.append(((here & -here).bit_length() - 1, exceeds, moved - outside))
        stop, exceeds, moved = min(found)
        return stop, (moved, exceeds)


def _union(tables: Iterable[Pairs]) -> Pairs:
    found = Pairs()
    for pairs in tables:
        _add(found, pairs)
    return found


def _add(found: Pairs, pairs: Pairs) -> None:
    for start, stops in pairs.items():
        found[start] = found.get(start, 0) | stops
