"""The cuts among equally good ones for V placement: see `folded` for the search, `weighted` for the rules of ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megaplan.partition.constraints import Constraints
from megaplan.partition.folded import Fold, Pairs
from megaplan.partition.limits import PairLimits
from megaplan.partition.values import Balance, StackCosts


def balance_folded(
    costs: StackCosts,
    num_ranks: int,
    constraints: Constraints | None = None,
    *,
    limits: Sequence[PairLimits] | None = None,
    baseline: Sequence[int] | None = None,
    most: int | None = None,
) -> Balance | None:
    """The best cuts for V placement under the constraints; no slot is empty.

    Args:
        costs: What is balanced.
        num_ranks: pp; there are twice as many slots.
        constraints: Forbidden and pinned cuts, layers that stay together.
        limits: What each rank may hold.
        baseline: 2 · num_ranks − 1 cuts; ties go to the solution that keeps most of them in their place.
        most: The largest rank sum that is of use; None for any.

    Returns:
        The cuts and the largest rank sum; None if the limits leave no split, or none of use.

    Raises:
        MegaplanError: MP327 … MP330 if the constraints leave no split, whatever the limits.
        ValueError: If the baseline has another number of cuts.
    """
    rules = constraints or Constraints()
    rules.check(len(costs.layers), 2 * num_ranks)
    if baseline is not None and len(baseline) != 2 * num_ranks - 1:
        raise ValueError(f"the baseline has {len(baseline)} cuts, and {2 * num_ranks} slots have {2 * num_ranks - 1}")
    fold = Fold(costs, num_ranks, rules, limits)
    high = fold.total
    if most is not None:
        high = min(high, most // fold.unit * fold.unit)
        if high < fold.lower_bound() or not fold.feasible(high):
            return None
    value = _smallest(fold.lower_bound(), high, fold.unit, fold.feasible)
    return None if value is None else Balance(_Ties(fold, value, baseline).cuts(), value)


def within_limits_folded(costs: StackCosts, num_ranks: int, constraints: Constraints, limits: Sequence[PairLimits]) -> bool:
    """Whether any cuts for V placement keep within the limits, whatever they cost."""
    fold = Fold(costs, num_ranks, constraints, limits)
    return fold.feasible(fold.total)


def _smallest(low: int, high: int, unit: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest multiple of the unit in [low, high] for which a monotone condition holds; None if it holds nowhere.

    Steps that double, then bisection: the optimum lies near the lower bound, where a test is cheap.
    """
    at, top, step = -(-low // unit), high // unit, max(1, low // unit >> 12)
    if holds(at * unit):
        return at * unit
    while at < top:  # `at` does not hold
        probe = min(at + step, top)
        if holds(probe * unit):
            top = probe
            break
        at, step = probe, 4 * step
    else:
        return None
    while top - at > 1:
        middle = (at + top) // 2
        at, top = (at, middle) if holds(middle * unit) else (middle, top)
    return top * unit


class _Label(NamedTuple):
    """What a partial solution has used: cuts moved against the baseline, and ranks above the second-largest limit."""

    moved: int = 0
    spare: int = 0


_Levels = list[Pairs]
"""Pairs by cuts that may still move: 0, 1, …; each holds those of the one before."""


class _Ties:
    """Chooses among the cuts that attain the bottleneck."""

    def __init__(self, fold: Fold, value: int, baseline: Sequence[int] | None) -> None:
        self._fold, self._value, self._num_moved = fold, value, 0
        self._kept: list[tuple[int, int]] | None = None  # of the baseline, before each rank: start and stop; -1 where it is not allowed
        if baseline is not None:
            positions = [position if (position := fold.position(cut)) is not None else -1 for cut in baseline]
            self._kept = [(0, fold.end), *zip(positions[: fold.num_ranks - 1], reversed(positions[fold.num_ranks :]), strict=True)]
            self._kept.append((positions[fold.num_ranks - 1], -1))  # one cut inside the innermost rank
            self._num_moved = self._fewest_moved()
        if self._num_moved == 2 * fold.num_ranks - 1:  # every cut moves: the baseline decides nothing
            self._kept, self._num_moved = None, 0

    def cuts(self) -> tuple[int, ...]:
        """The one solution that all rules leave."""
        fold = self._fold
        if fold.num_ranks == 1:
            return self._in_order(self._tables(0), 0)
        low = max(0, -(-(fold.total - self._value) // (fold.num_ranks - 1)))  # the other ranks share what the largest leaves
        second = _smallest(low, self._value, fold.unit, self._levels_out)
        if second is None:
            raise AssertionError("a solution exists")
        return self._in_order(self._tables(second), second)

    def _levels_out(self, second: int) -> bool:
        """Whether all ranks but one can stay within a limit; if so, later searches look only at what can then be."""
        fold, tables = self._fold, self._tables(second)
        if not tables[0][1][-1]:
            return False
        within, level, large = [], {0: 1 << fold.end}, Pairs()  # large: one rank outside exceeds it
        for rank in range(fold.num_ranks):
            within.append(_union(level, large))
            none, one = (levels[-1] for levels in tables[rank + 1])
            large = _union(fold.after_rank(rank, large, second, none), fold.after_rank(rank, level, self._value, none))
            level = fold.after_rank(rank, level, second, one)
        fold.keep_within([*within, _union(level, large)])
        return True

    def _fewest_moved(self) -> int:
        """Level by level: a level's pairs need only those of the level below."""
        fold = self._fold
        centre, levels = [fold.centre()], [list[Pairs]() for _ in range(fold.num_ranks)]
        for moved in range(2 * fold.num_ranks):
            inner = centre
            for rank in reversed(range(fold.num_ranks)):
                levels[rank].append(self._level(rank, inner, levels[rank], moved, self._value, rank * self._value))
                inner = levels[rank]
            if levels[0][moved]:
                return moved
        raise AssertionError("a solution moves at most every cut")

    def _level(self, rank: int, inner: _Levels, found: _Levels, moved: int, limit: int, outside: int) -> Pairs:
        """Pairs before the rank when that many cuts inside may move, from those with one fewer and what is new inside."""
        fresh = self._counted(rank + 1, inner, moved)
        if moved == 0:
            return self._fold.before_rank(rank, fresh, limit, outside)
        known = self._counted(rank + 1, inner, moved - 1)
        fresh = {start: new for start, stops in fresh.items() if (new := stops & ~known.get(start, 0))}
        return _union(found[moved - 1], self._fold.before_rank(rank, fresh, limit, outside))

    def _counted(self, rank: int, levels: _Levels, moved: int) -> Pairs:
        """Pairs before a rank when that many cuts may move, the two that make the pair among them."""
        if self._kept is None:
            return levels[min(moved, len(levels) - 1)]
        own_start, own_stop = self._kept[rank]
        kept = 1 << own_stop if own_stop >= 0 else 0
        found = Pairs()
        num_cuts = 2 if rank < self._fold.num_ranks else 1
        for start in levels[min(moved, len(levels) - 1)]:
            left = moved - (start != own_start)
            if left < 0:
                continue
            stops = levels[min(left, len(levels) - 1)].get(start, 0)
            if num_cuts == 2:
                stops = stops & kept | (levels[min(left - 1, len(levels) - 1)].get(start, 0) if left else 0)
            if stops:
                found[start] = stops
        return found

    def _tables(self, second: int) -> list[tuple[_Levels, _Levels]]:
        """Before each rank, and at the centre: pairs where no rank, or one at most, from there on exceeds `second`.

        The second are those where no rank outside has to exceed it.
        """
        fold, value = self._fold, self._value
        none = one = [fold.centre()]
        tables = [(none, one)]
        for rank in reversed(range(fold.num_ranks)):
            none_next, one_next = list[Pairs](), list[Pairs]()
            aside = max(0, rank - 1) * second + min(rank, 1) * value  # outside, one rank may be the large one
            for moved in range(self._num_moved + 1):
                none_next.append(self._level(rank, none, none_next, moved, second, aside))
            spare: _Levels = []
            for moved in range(self._num_moved + 1):
                spare.append(self._level(rank, none, spare, moved, value, rank * second))
            for moved in range(self._num_moved + 1):
                one_next.append(self._level(rank, one, one_next, moved, second, rank * second))
            one_next = [_union(*both) for both in zip(one_next, spare, strict=True)]
            none, one = none_next, one_next
            tables.append((none, one))
        return tables[::-1]

    def _in_order(self, tables: list[tuple[_Levels, _Levels]], second: int) -> tuple[int, ...]:
        """Smallest cut first: the starts from outside in, the centre, then the stops from inside out."""
        fold = self._fold
        start, reached = 0, {_Label(): 1 << fold.end}
        starts, steps = [0], [reached]
        for rank in range(fold.num_ranks):
            start, reached = self._next_start(rank, start, reached, tables[rank + 1], second)
            starts.append(start)
            steps.append(reached)
        stops, used = [start], _Label()
        for rank in reversed(range(1, fold.num_ranks)):
            stop, used = self._next_stop(rank, (starts[rank], starts[rank + 1]), (steps[rank], stops[-1]), used, second)
            stops.append(stop)
        return tuple(fold.edges[position] for position in (*starts[1:], *stops[1:]))

    def _next_start(
        self, rank: int, start: int, reached: dict[_Label, int], inner: tuple[_Levels, _Levels], second: int
    ) -> tuple[int, dict[_Label, int]]:
        """The smallest position the rank's first span may stop at, and the stops then reached by what they used."""
        none, one = inner
        for inner_start in sorted(position for position in _union(none[-1], one[-1]) if position > start):
            found: dict[_Label, int] = {}
            for (moved, spare), stops in reached.items():
                for large, limit in ((0, second), (1, self._value)):
                    levels = (one, none)[spare + large] if spare + large < 2 else []
                    for used, kept in self._split(rank + 1, inner_start, moved) if levels else ():
                        left = min(self._num_moved - used, len(levels) - 1)
                        inside = levels[left].get(inner_start, 0) & kept if left >= 0 else 0
                        if inside and (got := self._fold.inward(rank, (start, inner_start), stops, limit) & inside):
                            label = _Label(used, spare + large)
                            found[label] = found.get(label, 0) | got
            if found:
                return inner_start, found
        raise AssertionError("a solution exists")

    def _next_stop(
        self, rank: int, starts: tuple[int, int], stops: tuple[dict[_Label, int], int], used: _Label, second: int
    ) -> tuple[int, _Label]:
        """The smallest stop of the rank's second span, and what it and all ranks inside have used."""
        fold, (reached, inner_stop) = self._fold, stops
        moves = self._moves(rank + 1, starts[1], inner_stop)
        for stop in _bits(_any(reached)):
            for spare, limit in ((0, second), (1, self._value)):
                inside = _Label(used.moved + moves, used.spare + spare)
                if inside.spare > 1 or not fold.outward(rank, starts, 1 << inner_stop, limit) >> stop & 1:
                    continue
                for label, bits in reached.items():
                    if bits >> stop & 1 and label.moved + inside.moved <= self._num_moved and label.spare + inside.spare <= 1:
                        return stop, inside
        raise AssertionError("a solution exists")

    def _split(self, rank: int, start: int, moved: int) -> tuple[tuple[int, int], ...]:
        """(cuts moved with those of the pair, the stops for which it is that many), for a start before a rank."""
        if self._kept is None:
            return ((moved, -1),)
        own_start, own_stop = self._kept[rank]
        moved += start != own_start
        if rank == self._fold.num_ranks:  # one cut: start and stop are one position
            return ((moved, -1),)
        kept = 1 << own_stop if own_stop >= 0 else 0
        return (moved, kept), (moved + 1, ~kept)

    def _moves(self, rank: int, start: int, stop: int) -> int:
        """Cuts before the rank that are not the baseline's."""
        return next(moved for moved, stops in self._split(rank, start, 0) if stops >> stop & 1)


def _union(one: Pairs, other: Pairs) -> Pairs:
    found = dict(one)
    for start, stops in other.items():
        found[start] = found.get(start, 0) | stops
    return found


def _any(reached: dict[_Label, int]) -> int:
    found = 0
    for bits in reached.values():
        found |= bits
    return found


def _bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
