"""The best cuts that fit: exact bottleneck cuts under limits that are certain, measured by the budget, and refined.

1. Cuts under limits that every fitting split keeps (`layer_bytes`). Their value is a lower bound. If they fit by the budget, they are the
   best ones.
2. Otherwise the same limits are tightened by the further bytes of the budget. The resulting cuts give an upper bound, which often equals
the lower bound. 3. Otherwise spans that do not fit on a rank are shrunk to the smallest spans that do not fit, and excluded; then the
search repeats. If the two slots of a V, or one slot, are excluded together, this is exact; in loop placement a rank exceeds its memory with
   several chunks, each of which could be the one to shrink, and the search branches.

The order is best first, so the first cuts that fit are optimal, provided that cuts that fit still fit when layers are removed. When the
budgets or the work allowed are spent, the best cuts found so far are returned with the lower bound reached.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from megaplan.layout.build import Spans, cuts_of, spans_of
from megaplan.partition.best_cuts import climb
from megaplan.partition.memory import Memory
from megaplan.partition.stack import Exclusion, Shares, Stack
from megaplan.partition.values import Balance

MAX_BUDGETS = 400
"""Largest number of splits that one search budgets."""
MAX_WORK = 300_000
"""Work limit of one search's partitions, by `Stack.partition_work`: a quarter of a second, large with 1,000 layers or dozens of chunks."""
MAX_STAGE_WORK = 100_000
"""Work limit of the stages that one search evaluates, by `Memory.work`; the search for the smallest overflow gets a third of it."""
MAX_ROUNDS = 12
"""Largest number of rounds of tightening."""
RATIOS = ((1, 4), (1, 2), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1), (9, 1), (16, 1), (32, 1))
"""Ratios between the memory of a chunk and of the one before it, when a rank's memory is divided among its chunks."""


class Fitted(NamedTuple):
    """Cuts that fit within an allowance.

    Attributes:
        balance: The cuts and their value.
        lower_bound: Lower bound over all cuts that fit.
    """

    balance: Balance
    lower_bound: int


@dataclass(slots=True)
class Effort:
    """Work limits that several searches share.

    Attributes:
        most: Limit of work on partitions.
        memory: Evaluator of stages.
        last: Work of `memory` at which no more stages are evaluated.
        spent: Work on partitions so far.
    """

    most: int
    memory: Memory
    last: int
    spent: int = 0

    @property
    def exhausted(self) -> bool:
        """True if the limit is reached."""
        return self.spent >= self.most or self.memory.work >= self.last

    def allows(self, work: int) -> bool:
        """True if the given work is still allowed."""
        return self.spent + work <= self.most


@dataclass(slots=True)
class _Search:
    """Best-first search for cuts in which no rank exceeds its memory by more than an allowance.

    Attributes:
        most: The largest acceptable cost of a slot, or rank; None for any.
        refuted: Exclusions that leave no cuts within the sums. If every branch of the search ends with one of these, it is proven that
            nothing fits.
        least_excluded: Smallest excess of spans that contain an exclusion of the search.
    """

    stack: Stack
    memory: Memory
    allowance: int
    max_budgets: int
    effort: Effort
    any_will_do: bool = False
    most: int | None = None
    refuted: list[tuple[Exclusion, ...]] = field(default_factory=list)
    least_excluded: int = 1 << 62
    nodes: list[tuple[int, int, tuple[Exclusion, ...], Balance]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=count)

    def run(self) -> tuple[Fitted | None, bool]:
        """The cuts found, and true if the result is proven, including the result that nothing fits."""
        last = self.memory.num_budgets + self.max_budgets
        self._push(())
        best: Fitted | None = None
        while self.nodes:
            value, _, exclusions, found = heappop(self.nodes)
            if best is not None and best.balance.value <= value:
                return Fitted(best.balance, best.balance.value), True
            over = self._over(found)
            if not over:
                return Fitted(found, value), True
            if best is None and not exclusions and (tightened := self._nearby(found)) is not None:
                best = Fitted(tightened, value)
                if tightened.value == value or self.any_will_do:
                    return best, True
            if self.memory.num_budgets >= last or self.effort.exhausted:
                return (best._replace(lower_bound=value) if best is not None else None), False
            exclusion, excess = self._smallest(over[0], self._spans(found))
            self.least_excluded = min(self.least_excluded, excess)
            for each in (exclusion,) if self.stack.where != "loop" else ((part,) for part in exclusion):
                self._push((*exclusions, each))
        return (Fitted(best.balance, best.balance.value), True) if best is not None else (None, True)

    def _push(self, exclusions: tuple[Exclusion, ...]) -> None:
        found = self._best(exclusions, (self.allowance,) * self.stack.pp)
        if found is not None:
            heappush(self.nodes, (found.value, next(self.order), exclusions, found))
        else:
            self.refuted.append(exclusions)

    def _best(self, exclusions: tuple[Exclusion, ...], spare: Sequence[int] | None, shares: Shares | None = None) -> Balance | None:
        self.effort.spent += self.stack.partition_work
        return self.stack.best(exclusions, spare, shares, self.most)

    def bound(self, high: int) -> int:
        """Called after a proof that no cuts are within the allowance.

        Returns the largest proven bound, at most `high`: no cuts exceed the memory by less.

        Cuts either violate an exclusion and exceed memory by its excess, or obey all exclusions and exceed the sums.
        """
        most = min(high, self.least_excluded) - 1
        if most <= self.allowance or any(self.stack.leaves_any(exclusions, (most,) * self.stack.pp) for exclusions in self.refuted):
            return self.allowance + 1
        return most + 1

    def _spans(self, found: Balance) -> Spans:
        return spans_of(found.cuts, self.stack.num_layers)

    def _over(self, found: Balance) -> list[int]:
        """Ranks that exceed the allowance, worst first."""
        excesses = self.memory.excesses(self._spans(found))
        return sorted((rank for rank in range(self.stack.pp) if excesses[rank] > self.allowance), key=lambda rank: -excesses[rank])

    def _nearby(self, found: Balance) -> Balance | None:
        """Cuts that fit, without proof."""
        tightened = self._tightened(found)
        if self.stack.where != "loop" or (tightened is not None and (tightened.value == found.value or self.any_will_do)):
            return tightened
        apportioned = (self._apportioned(ratio) for ratio in RATIOS if not self.effort.exhausted)
        fitting = [each for each in (tightened, *apportioned) if each is not None]
        best = min(fitting, key=lambda each: (each.value, each.cuts), default=None)
        return best if best is None or self.any_will_do else self._levelled(best)

    def _levelled(self, found: Balance) -> Balance:
        """Move a run of neighbouring cuts by one allowed position while the largest slots get smaller and the cuts still fit."""
        stack = self.stack

        def order(cuts: tuple[int, ...]) -> list[int]:
            return sorted(stack.costs.of_slots(spans_of(cuts, stack.num_layers)), reverse=True)

        best = order(found.cuts)

        def gains(cuts: tuple[int, ...]) -> bool:
            nonlocal best
            if (found := order(cuts)) >= best or self._over(Balance(cuts, 0)):
                return False
            best = found
            return True

        cuts = climb(found.cuts, stack.rules, stack.num_layers, gains, lambda: self.effort.exhausted, pairs=False)
        return Balance(cuts, best[0])

    def _apportioned(self, ratio: tuple[int, int]) -> Balance | None:
        """The best cuts that fit when a rank's memory is divided among its chunks in advance."""
        stack, margins = self.stack, [0] * self.stack.pp
        for _ in range(MAX_ROUNDS):
            found = self._best((), None, stack.apportioned(ratio, [self.allowance - margin for margin in margins]))
            if found is None:
                return None
            spans, over = self._spans(found), self._over(found)
            if not over:
                return found
            for rank in over:
                excess = self.memory.excesses(spans)[rank]
                margins[rank] = max(margins[rank] + excess - self.allowance, excess - stack.rank_excess(rank, spans))
        return None

    def _tightened(self, found: Balance, rounds: int = MAX_ROUNDS) -> Balance | None:
        """Cuts within sums tightened by the budget's known further bytes; in loop placement by each slot's share."""
        stack, margins = self.stack, [0] * self.stack.pp
        shares: Shares = {}
        for _ in range(rounds):
            spans = self._spans(found)
            excesses = self.memory.excesses(spans)
            over = self._over(found)
            if not over:
                return found
            for rank in over:
                margins[rank] = max(margins[rank] + 1, excesses[rank] - stack.rank_excess(rank, spans))
                if stack.where == "loop":
                    shares = {**shares, **stack.shares(rank, spans, excesses[rank] - self.allowance)}
            if self.effort.exhausted:
                return None
            better = self._best((), [self.allowance - margin for margin in margins], shares)
            if better is None:
                return None
            found = better
        return None

    def _smallest(self, rank: int, spans: Spans) -> tuple[Exclusion, int]:
        """Spans of the rank, shrunk from each end as long as the rank still exceeds the allowance, and its excess.

        The neighbours take the removed layers.
        """
        edges = (0, *self.stack.rules.allowed_cuts(self.stack.num_layers), self.stack.num_layers)
        cuts, owned = list(cuts_of(spans)), self.stack.slots(rank)
        for slot in owned:
            for boundary, outside in ((slot, slot - 1), (slot + 1, slot + 1)):
                if not 0 <= outside < len(spans) or outside in owned:
                    continue
                start, stop = spans_of(cuts, self.stack.num_layers)[slot]
                inner = [edge for edge in edges if start < edge < stop]
                steps = inner if boundary == slot else inner[::-1]
                low, high = 0, len(steps)  # the first `low` steps still exceed the memory
                while low < high:
                    middle = (low + high + 1) // 2
                    tried = [*cuts[: boundary - 1], steps[middle - 1], *cuts[boundary:]]
                    if self.memory.excess(rank, spans_of(tried, self.stack.num_layers)) > self.allowance:
                        low = middle
                    else:
                        high = middle - 1
                if low:
                    cuts[boundary - 1] = steps[low - 1]
        found = spans_of(cuts, self.stack.num_layers)
        return tuple((slot, found[slot]) for slot in owned), self.memory.excess(rank, found)


def best_fitting(stack: Stack, memory: Memory, max_budgets: int = MAX_BUDGETS) -> Fitted | None:
    """The best cuts that fit by the budget, and a lower bound over all cuts that fit; None if none were found.

    In loop placement the search limits each chunk by itself; the mean of a rank's sums excludes some cases without branching.
    """
    if stack.where == "loop" and stack.least_excess > 0:
        return None
    return _Search(stack, memory, 0, max_budgets, _effort(memory)).run()[0]


class Quick(NamedTuple):
    """The result of `quick_fitting`.

    Attributes:
        balance: Cuts that fit; None if none were found.
        proven: True if it is proven that no cuts fit.
        beyond: True if it is proven that no acceptable cuts fit.
    """

    balance: Balance | None
    proven: bool = False
    beyond: bool = False


def quick_fitting(stack: Stack, memory: Memory, rounds: int, most: int | None = None) -> Quick:
    """Cuts that fit, found by tightening the sums.

    Args:
        stack: Stack with the sums that every fitting split keeps.
        memory: Budgets of its splits.
        rounds: Rounds of tightening; each budgets one more split.
        most: The largest acceptable cost of a slot, or rank; None for any.
    """
    found = stack.best(most=most)
    if found is None:
        return Quick(None, most is None or not stack.leaves_any((), (0,) * stack.pp), beyond=True)
    return Quick(_Search(stack, memory, 0, 0, _effort(memory), most=most)._tightened(found, rounds))


class Overflow(NamedTuple):
    """Excess of the closest cuts over the memory.

    Attributes:
        cuts: Cuts with the smallest largest overflow found.
        overflow_bytes: Bytes of the overflow.
        lower_bound_bytes: Lower bound on the overflow of any cuts.
    """

    cuts: tuple[int, ...]
    overflow_bytes: int
    lower_bound_bytes: int


def min_overflow_bytes(stack: Stack, memory: Memory, cuts: tuple[int, ...], max_budgets: int = MAX_BUDGETS) -> Overflow:
    """The bytes by which the best attempt exceeds the memory.

    Args:
        stack: Layer costs, and sums that no cuts fit.
        memory: Budgets of its splits.
        cuts: Any cuts.
        max_budgets: Limit of budgets.
    """
    last, best, effort = memory.num_budgets + max_budgets, cuts, _effort(memory, 3)
    high = max(memory.excesses(spans_of(cuts, stack.num_layers)))
    low = proven = max(1, min(high, stack.least_excess))
    while low < high and memory.num_budgets < last and effort.allows(stack.partition_work) and not effort.exhausted:
        middle = (low + high) // 2
        search = _Search(stack, memory, middle, max(1, max_budgets // 16), effort, any_will_do=True)
        found, certain = search.run()
        if found is None:
            low = search.bound(high) if certain else middle + 1
            proven = low if certain else proven
        else:
            best = found.balance.cuts
            high = max(memory.excesses(spans_of(best, stack.num_layers)))
    if proven < high:
        best = _descend(stack, memory, best, memory.num_budgets + max_budgets, effort)
        high = max(memory.excesses(spans_of(best, stack.num_layers)))
    return Overflow(best, high, min(proven, high))


def _effort(memory: Memory, parts: int = 1) -> Effort:
    return Effort(MAX_WORK // parts, memory, memory.work + MAX_STAGE_WORK // parts)


def _descend(stack: Stack, memory: Memory, cuts: tuple[int, ...], last: int, effort: Effort) -> tuple[int, ...]:
    """Move a run of neighbouring cuts by one allowed position while the largest overflow falls."""
    least = memory.excesses(spans_of(cuts, stack.num_layers))

    def gains(tried: tuple[int, ...]) -> bool | None:
        nonlocal least
        if effort.exhausted:
            return None
        spans = spans_of(tried, stack.num_layers)
        most = max(least)
        # A move that leaves the worst rank unchanged gains nothing.
        if memory.excess(least.index(most), spans) >= most or max(memory.excesses(spans)) >= most:
            return False
        least = memory.excesses(spans)
        return True

    return climb(cuts, stack.rules, stack.num_layers, gains, lambda: memory.num_budgets >= last or effort.exhausted, pairs=False)
