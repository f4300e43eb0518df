"""A bound that no cuts under the same constraints can be below in step time.

Every cut makes every path (`paths`) at least so long; the bound is the smallest value that the longest path can have. With one slot or a V
of two slots on a rank, the constraint that no path is longer than a limit is a limit on spans (`limits`), and bisection over it is exact.
In loop placement it couples the chunks of a rank: the longest path is bounded by a weighted mean of all paths (`mean_bound`), and each
slot by what the rank's other slots take at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from megaplan.cost.times import ModelTimes
from megaplan.partition.constraints import Constraints
from megaplan.partition.folded import Fold
from megaplan.partition.limits import EdgeWeights, PairLimits, SlotLimits, Weight
from megaplan.partition.mean_bound import SlotSum, mean_bound
from megaplan.partition.paths import PARTS, Path, Times, before
from megaplan.partition.values import StackCosts
from megaplan.partition.weighted import within_limits
from megaplan.schedules.placement import Placement, slots_of_rank


class StepBound:
    """Bounds of one model's step under one schedule."""

    def __init__(self, times: ModelTimes, rules: Constraints, where: Placement, paths: Sequence[Path]) -> None:
        self._rules, self._where, self._paths, self._p2p = rules, where, paths, times.boundary_ns
        self._num_slots, self._num_layers = len(paths[0].slots), len(times.layers)
        self._num_ranks = max(path.rank for path in paths) + 1
        total = [layer.total_ns for layer in times.layers]
        self._costs = StackCosts(tuple(total), times.first.total_ns, times.last.total_ns, "ns")
        self._before = [before(times, part) for part in PARTS]

    def lower_bound(self, reached: int, num_microbatches: int) -> int:
        """No cuts have a shorter step.

        Args:
            reached: Step time of some cuts.
            num_microbatches: A rank's load, this many times, is on one of its paths.
        """
        low, high = self._mean() if self._where == "loop" else 0, reached  # no cuts are below `low`
        fold = Fold(self._costs, self._num_ranks, self._rules, None) if self._where == "v" else None
        edges = EdgeWeights()
        while low < high:
            middle = (low + high) // 2
            if fold is None:
                holds = within_limits(self._costs, self._num_slots, self._rules, self._slot_limits(middle), edges)
            else:
                fold.limit(self._pair_limits(middle))
                holds = fold.feasible(middle // num_microbatches)
            low, high = (low, middle) if holds else (middle + 1, high)
        return low

    def _slot_limits(self, limit: int) -> list[SlotLimits]:
        return [SlotLimits(tuple([(weight, limit - rest) for weight, rest in sums])) for sums in self._slot_sums]

    def _pair_limits(self, limit: int) -> list[PairLimits]:
        return [PairLimits(tuple([(first, second, limit - rest) for first, second, rest in sums])) for sums in self._pair_sums]

    @cached_property
    def _slot_sums(self) -> list[list[tuple[Weight, int]]]:
        """For each slot, of each path of its rank: what the slot's span weighs, and what the path takes beside it.

        Exact for one slot a rank; of several, each is limited by what the others and the slots between them take at least.
        """
        sums: list[list[tuple[Weight, int]]] = [[] for _ in range(self._num_slots)]
        for path in self._paths:
            rest = path.transfers * self._p2p
            if self._where == "single":
                sums[path.rank].append((self._weights(path, (path.rank,))[0], rest))
                continue
            everywhere = tuple(map(min, zip(*path.slots, strict=True)))  # what runs on every slot takes the same for all cuts
            rest += self._scaled(everywhere)[-1]
            own = slots_of_rank(self._where, path.rank, self._num_ranks, self._num_slots // self._num_ranks)
            weights = {slot: self._scaled(_less(path.slots[slot], everywhere)) for slot in own}
            least = {slot: min(stop - start for start, stop in pairwise(weight)) for slot, weight in weights.items()}
            for slot, weight in weights.items():
                sums[slot].append((Weight(weight, weight), rest + sum(least.values()) - least[slot]))
        return sums

    @cached_property
    def _pair_sums(self) -> list[list[tuple[Weight, Weight, int]]]:
        """For each rank of a V, of each of its paths: what the spans of its slots weigh, and the transfers."""
        sums: list[list[tuple[Weight, Weight, int]]] = [[] for _ in range(self._num_ranks)]
        for path in self._paths:
            first, second = self._weights(path, slots_of_rank("v", path.rank, self._num_ranks, 2))
            sums[path.rank].append((first, second, path.transfers * self._p2p))
        return sums

    def _weights(self, path: Path, own: Sequence[int]) -> list[Weight]:
        """A path as weights of its rank's spans, transfers left out.

        The slots before, between and after the rank's own are alike on a path, so what they take follows from where the own ones end: those
        before and between are counted with the span after them, those after all with the last span, whose weight is never negative.
        """
        found, outside = [], path.slots[own[0] - 1] if own[0] else _NEVER
        for slot in own:
            behind = path.slots[slot + 1] if slot + 1 < self._num_slots and slot + 1 not in own else _NEVER
            down = self._scaled(_less(path.slots[slot], outside))
            up = self._scaled(_less(path.slots[slot], behind))
            if slot == own[-1]:
                after = self._scaled(behind)[-1]
                up = [size + after for size in up]
            found.append(Weight(up, down))
            outside = behind
        return found

    def _scaled(self, often: Sequence[int]) -> list[int]:
        """Time of all layers before each one, with F, I and W so often."""
        forward, backward, weight = self._before
        f, i, w = often
        return [f * a + i * b + w * c for a, b, c in zip(forward, backward, weight, strict=True)]

    def _mean(self) -> int:
        sums = []
        for path in self._paths:
            before = {slot: self._scaled(times) for slot, times in enumerate(path.slots) if any(times)}
            sums.append(SlotSum(before, path.transfers * self._p2p))
        return mean_bound(sums, self._num_slots, self._num_layers, self._rules)


_NEVER: Times = (0, 0, 0)


def _less(one: Times, other: Sequence[int]) -> Times:
    return one[0] - other[0], one[1] - other[1], one[2] - other[2]
