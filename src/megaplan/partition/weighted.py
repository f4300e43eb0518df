"""`weighted`, objective bottleneck: cuts whose largest slot is the smallest possible, exactly.

For single and loop placement a step is paced by its largest chunk, so every slot counts alone. All costs are integers.

Method. Layers between two allowed cuts are one *atom*; positions are the edges of atoms. For a limit, the positions from which slots
k … S − 1 can be filled within it are computed from the last slot to the first, as the bits of one integer. A position i precedes a set
Q iff the span from i to the *nearest* j of Q after i is allowed, because a part of an allowed span is allowed. (The usual greedy that
always takes the furthest cut is wrong once caps differ by slot and no slot may be empty: running ahead can push a large layer into a
slot with a smaller cap.) Bisection over the limit gives the bottleneck and refutes every smaller value.

Optima are many. Among them: fewest cuts moved against the baseline, then the smallest second-largest slot (with multiplicity: two equal
largest slots have it at the bottleneck itself), then the lexicographically smallest cuts. All three are searched for exactly, by the same
sets with two budgets added: moved cuts still to spend, and whether one slot may still exceed the second-largest limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from megaplan.partition.constraints import Constraints
from megaplan.partition.limits import EdgeWeights, SlotLimits, layer_weight, slot_reaches
from megaplan.partition.values import Balance, StackCosts


def balance(
    costs: StackCosts,
    num_slots: int,
    constraints: Constraints | None = None,
    *,
    limits: Sequence[SlotLimits] | None = None,
    baseline: Sequence[int] | None = None,
    weights: EdgeWeights | None = None,
    most: int | None = None,
) -> Balance | None:
    """The best cuts under the constraints; no slot is empty.

    Args:
        costs: What is balanced.
        num_slots: pp · vpp.
        constraints: Forbidden and pinned cuts, layers that stay together.
        limits: What each slot may hold.
        baseline: num_slots − 1 cuts; ties go to the solution that keeps most of them in their place.
        weights: Of an earlier call with the same layers and constraints.
        most: The largest cost of a slot that is of use; None for any.

    Returns:
        The cuts and the cost of their largest slot; None if the limits leave no split, or none of use.

    Raises:
        MegaplanError: MP327 … MP330 if the constraints leave no split, whatever the limits.
        ValueError: If the baseline has another number of cuts.
    """
    rules = constraints or Constraints()
    rules.check(len(costs.layers), num_slots)
    if baseline is not None and len(baseline) != num_slots - 1:
        raise ValueError(f"the baseline has {len(baseline)} cuts, and {num_slots} slots have {num_slots - 1}")
    stack = _Stack(costs, num_slots, rules, limits, weights)
    high = stack.total if most is None else min(stack.total, most)
    low = max(stack.largest_atom, -(-stack.total // num_slots))
    if low > high or not stack.feasible(high):
        return None
    value = stack.smallest_cost(low, high, stack.feasible)
    return Balance(_TieBreak(stack, value, baseline).cuts(), value)


def within_limits(
    costs: StackCosts, num_slots: int, constraints: Constraints, limits: Sequence[SlotLimits], weights: EdgeWeights | None = None
) -> bool:
    """Whether any cuts keep within the limits, whatever they cost; `weights` as for `balance`."""
    stack = _Stack(costs, num_slots, constraints, limits, weights)
    return stack.feasible(stack.total)


class _Stack:
    """Atoms, their costs and limits. Positions are indices of atom edges; a set of positions is an integer's bits."""

    def __init__(
        self,
        costs: StackCosts,
        num_slots: int,
        constraints: Constraints,
        limits: Sequence[SlotLimits] | None,
        weights: EdgeWeights | None = None,
    ) -> None:
        num_layers = len(costs.layers)
        self.num_slots = num_slots
        self.edges = (0, *constraints.allowed_cuts(num_layers), num_layers)
        self.end = len(self.edges) - 1
        by_layer = layer_weight(costs.layers, costs.first, costs.last).up
        self._before = [by_layer[edge] for edge in self.edges]
        self.total = self._before[-1]
        self._atoms = [after - before for before, after in pairwise(self._before)]
        self.largest_atom = max(self._atoms)
        pins, self._last_pin = set(constraints.pin), [0] * len(self.edges)
        for position in range(1, len(self.edges)):
            behind = position - 1
            self._last_pin[position] = behind if self.edges[behind] in pins else self._last_pin[behind]
        self._limits = slot_reaches(self.edges, limits, weights) if limits is not None else None

    def position(self, cut: int) -> int | None:
        """Index of a cut among the edges; None if it is not allowed."""
        index = bisect_left(self.edges, cut)
        return index if index < len(self.edges) and self.edges[index] == cut else None

    def smallest_cost(self, low: int, high: int, holds: Callable[[int], bool]) -> int:
        """The smallest cost a slot can have in [low, high] for which a monotone condition holds; it holds at `high`.

        Bisection whose ends step from one sum of consecutive atoms to the next: costs between two sums decide alike.
        """
        before = self._before
        while low < high:
            middle = (low + high) // 2
            if holds(middle):
                high = max(low, *(before[bisect_right(before, begin + middle) - 1] - begin for begin in before))
            else:
                above = (bisect_right(before, begin + middle) for begin in before)
                sums = [before[stop] - begin for begin, stop in zip(before, above, strict=True) if stop < len(before)]
                low = min([high, *sums])
        return low

    def small_atoms(self, limit: int) -> int:
        """Atoms that stay within the limit, as bits."""
        everything = (1 << self.end) - 1
        if limit >= self.largest_atom:
            return everything
        return everything ^ sum(1 << index for index, cost in enumerate(self._atoms) if cost > limit)

    def start(self, slot: int, stop: int, limit: int) -> int:
        """Smallest position from which the slot reaches `stop` within limit, pins and cap; `stop` itself if none does."""
        first = max(bisect_left(self._before, self._before[stop] - limit), self._last_pin[stop])
        return first if self._limits is None else min(stop, max(first, self._limits[slot].start(stop)))

    def predecessors(self, slot: int, targets: int, limit: int, atoms: int) -> int:
        """Positions from which the slot can reach one of the targets; `atoms` is `small_atoms(limit)`."""
        found = (targets >> 1) & atoms
        if self._limits is not None:
            found &= self._limits[slot].atoms
        run_starts = targets & ~(targets << 1)
        while run_starts:
            stop = (run_starts & -run_starts).bit_length() - 1
            run_starts &= run_starts - 1
            found |= (1 << stop) - (1 << self.start(slot, stop, limit))
        return found

    def completions(self, limit: int) -> list[int]:
        """For each slot, where it may start so that it and all after it stay within the limit."""
        atoms, reached = self.small_atoms(limit), 1 << self.end
        found = []
        for slot in reversed(range(self.num_slots)):
            reached = self.predecessors(slot, reached, limit, atoms)
            found.append(reached)
        return found[::-1]

    def feasible(self, limit: int) -> bool:
        """Whether all slots can stay within the limit."""
        return bool(self.completions(limit)[0] & 1)


_Levels = list[int]
"""Sets of positions by moved cuts allowed: 0, 1, …; each holds the one before, and the last stands for all above."""


class _TieBreak:
    """Chooses among the cuts that attain the bottleneck."""

    def __init__(self, stack: _Stack, value: int, baseline: Sequence[int] | None) -> None:
        self._stack, self._value = stack, value
        everywhere = (1 << (stack.end + 1)) - 1
        self._kept = [everywhere] * (stack.num_slots + 1)  # by slot: where its start counts as not moved
        self._num_moved = 0
        if baseline is not None:
            for slot, cut in enumerate(baseline, start=1):
                position = stack.position(cut)
                self._kept[slot] = 0 if position is None else 1 << position
            self._num_moved = self._fewest_moved()
        if self._num_moved == stack.num_slots - 1:  # every cut moves: the baseline decides nothing
            self._kept, self._num_moved = [everywhere] * (stack.num_slots + 1), 0

    def cuts(self) -> tuple[int, ...]:
        """The one solution that all three rules leave."""
        stack = self._stack
        if stack.num_slots == 1:
            return ()
        # The slots beside the largest share what it leaves.
        low = -(-(stack.total - self._value) // (stack.num_slots - 1))
        second = stack.smallest_cost(low, self._value, lambda limit: bool(self._tables(limit)[0][1][-1] & 1))
        return self._first_in_order(self._tables(second), second)

    def _fewest_moved(self) -> int:
        """Level by level: a level's sets need only those of the level below."""
        stack, limit = self._stack, self._value
        atoms, below = stack.small_atoms(limit), [0] * (stack.num_slots + 1)
        for moved in range(stack.num_slots):
            level = [0] * stack.num_slots + [1 << stack.end]
            for slot in reversed(range(stack.num_slots)):
                level[slot] = stack.predecessors(slot, level[slot + 1] & self._kept[slot + 1] | below[slot + 1], limit, atoms)
            if level[0] & 1:
                return moved
            below = level
        raise AssertionError("a solution moves at most every cut")

    def _tables(self, second: int) -> list[tuple[_Levels, _Levels]]:
        """For each slot, and the end: where it may start if no slot, or one slot at most, from there on exceeds `second`."""
        stack, limit = self._stack, self._value
        small, large = stack.small_atoms(second), stack.small_atoms(limit)
        none = one = [1 << stack.end]
        tables = [(none, one)]
        for slot in reversed(range(stack.num_slots)):
            none_next, one_next = self._targets(none, slot + 1), self._targets(one, slot + 1)
            none = [stack.predecessors(slot, targets, second, small) for targets in none_next]
            one = [
                stack.predecessors(slot, within, second, small) | stack.predecessors(slot, targets, limit, large)
                for within, targets in zip(one_next, none_next, strict=True)
            ]
            tables.append((none, one))
        return tables[::-1]

    def _targets(self, levels: _Levels, slot: int) -> _Levels:
        """Where the slot may start, by moved cuts allowed when its own start is counted."""
        if slot == self._stack.num_slots:
            return levels
        kept = self._kept[slot]
        counted = [level & kept | below for level, below in zip([*levels, levels[-1]], [0, *levels], strict=True)]
        return counted[: self._num_moved + 1]

    def _allowing(self, moved: int, levels: _Levels, slot: int) -> int:
        """Where the slot may start when that many cuts may still move."""
        targets = self._targets(levels, slot)
        return targets[min(moved, len(targets) - 1)]

    def _first_in_order(self, tables: list[tuple[_Levels, _Levels]], second: int) -> tuple[int, ...]:
        """Smallest cut first, as long as the rest can be completed within the budgets."""
        stack, at, moved, spare, cuts = self._stack, 0, self._num_moved, 1, []
        for slot in range(stack.num_slots - 1):
            ahead = -1 << (at + 1)
            within = self._allowing(moved, tables[slot + 1][spare], slot + 1) & ahead
            stop = (within & -within).bit_length() - 1
            if stack.start(slot, stop, second) > at:
                # Only as the one slot above the second-largest limit.
                beyond = self._allowing(moved, tables[slot + 1][0], slot + 1) & ahead
                stop, spare = (beyond & -beyond).bit_length() - 1, 0
            moved -= not self._kept[slot + 1] >> stop & 1
            cuts.append(stack.edges[stop])
            at = stop
        return tuple(cuts)
