"""Lower bounds over all cuts, for a search of cuts and a search of layouts: on a step's time, and on sums of bytes held by chunks.

A step is at least as long as each of its paths (`paths`), and therefore as any weighted mean of them.

- With one slot or a V of two slots on a rank, the constraint that no path is longer than a limit is a limit on spans (`limits`), and
  bisection over it is exact.
- In loop placement the constraint couples the chunks of a rank: the longest path is bounded by a weighted mean of all, and each slot by the
  least time of the rank's other slots.
- For a search of layouts a mean path depends on the schedule alone, and a layer adds at least the smallest of its terms over the slots.

Weights of means are those of fictitious play. Any weights give a bound.

Source: G. W. Brown, Iterative solution of games by fictitious play, 1951.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import add, mul, sub
from typing import NamedTuple

from megaplan.cost.values import LayerTime, ModelTimes, fastest
from megaplan.partition.constraints import Constraints
from megaplan.partition.cut_search import CutSearch
from megaplan.partition.limits import SpanSum, Weight
from megaplan.partition.paths import PARTS, TURN_PARTS, RankPath, RunCounts, before, before_slots, parts_of, schedule_paths
from megaplan.partition.values import time_costs
from megaplan.schedules.placement import Placement, slots_of_rank

TURNS, FEWEST_TURNS = 96, 8
MAX_WORK = 400_000
"""Number of slot positions that all iterations together examine: deep stacks get fewer iterations, and so a smaller but still valid
bound.
"""
PATH_TURNS = 200
PACKED_PARTS = 1 << 12
"""`packed` may be below the best bound of its kind by this fraction."""
SlotNumbers = tuple[RunCounts, ...]


class SlotSum(NamedTuple):
    """A sum over slots.

    Attributes:
        before: Weight of all layers before each one, for each slot that counts.
        rest: Constant term, for any cuts.
    """

    before: Mapping[int, Sequence[int]]
    rest: int

    def of(self, edges: Sequence[int]) -> int:
        """The sum for cuts that include both ends of the model."""
        return self.rest + sum(at[edges[slot + 1]] - at[edges[slot]] for slot, at in self.before.items())


def mean_bound(sums: Sequence[SlotSum], num_slots: int, num_layers: int, rules: Constraints) -> int:
    """A lower bound on the largest of several sums, over all cuts under the constraints.

    A weighted mean of the sums is a sum over slots, whose minimum one pass over the slots finds. In each iteration the weight of the sum
    that is largest for the last cuts grows by one. All values are integers, so that the bound is the same everywhere.
    """
    edges, pins = (0, *rules.allowed_cuts(num_layers), num_layers), frozenset(rules.pin)
    mixed, rest, best = [[0] * (num_layers + 1)] * num_slots, 0, None
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
        for slot, at in chosen.before.items():
            mixed[slot] = list(map(add, mixed[slot], at))
    assert best is not None, "there is a turn"
    return best


def _shortest(weights: Sequence[Sequence[int]], edges: Sequence[int], pins: frozenset[int]) -> tuple[int, list[int]]:
    """The minimum over all cuts of a sum over slots, and the cuts that attain it, including both ends."""
    reached: list[int | None] = [0, *[None] * (len(edges) - 1)]
    table = []
    for at in weights:
        found: list[int | None] = []
        came_from: list[int] = []
        least: tuple[int, int] | None = None  # sum of the slots up to a position minus that of the layers before it; and the position
        for position, edge in enumerate(edges):
            found.append(None if least is None else least[0] + at[edge])
            came_from.append(-1 if least is None else least[1])
            if edge in pins:
                least = None
            value = reached[position]
            if value is not None and (least is None or value - at[edge] < least[0]):
                least = value - at[edge], position
        table.append(came_from)
        reached = found
    position, cuts, total = len(edges) - 1, [edges[-1]], reached[-1]
    assert total is not None, "the constraints leave a split"
    for came_from in reversed(table):
        position = came_from[position]
        cuts.append(edges[position])
    return total, cuts[::-1]


class StepBound:
    """Bounds on one model's step under one schedule."""

    def __init__(self, slots: Sequence[ModelTimes], rules: Constraints, where: Placement, paths: Sequence[RankPath]) -> None:
        """`slots` are the times of each slot's device; limits on spans use the smallest, means of paths each slot's own."""
        times = fastest(slots)
        self._rules, self._where, self._paths, self._p2p = rules, where, paths, times.boundary_ns
        self._num_slots, self._num_layers = len(paths[0].slots), len(times.layers)
        parts = parts_of(times)
        self._own, self._never = [before_slots(slots, part) for part in parts], (0,) * len(parts)
        self._differ = any(each is not times for each in slots)
        self._num_ranks = max(path.rank for path in paths) + 1
        self._costs = time_costs((times,))
        self._before = [before(times, part) for part in parts]

    def lower_bound(self, reached: int, num_microbatches: int) -> int:
        """A lower bound on the step.

        Args:
            reached: Step time of known cuts.
            num_microbatches: Multiple of a rank's load that one of its paths contains.
        """
        low, high = self._mean() if self._where == "loop" or self._differ else 0, reached
        search = CutSearch(self._costs, self._num_slots, self._rules, folded=self._where == "v")
        while low < high:
            middle = (low + high) // 2
            search.limit([[SpanSum(weights, middle - rest) for weights, rest in sums] for sums in self._sums])
            low, high = (low, middle) if search.feasible(middle // num_microbatches) else (middle + 1, high)
        return low

    @cached_property
    def _sums(self) -> list[list[tuple[tuple[Weight, ...], int]]]:
        """Limits from the paths of each rank, or slot of a loop: weights of its spans, and the path's remaining time.

        They are exact for one slot per rank and for a V; in a loop, a slot's limit follows from the least time of the other slots and of
        those between.
        """
        chunks = self._num_slots // self._num_ranks
        sums: list[list[tuple[tuple[Weight, ...], int]]] = [[] for _ in range(self._num_ranks if self._where == "v" else self._num_slots)]
        for path in self._paths:
            rest, own = path.transfers * self._p2p, slots_of_rank(self._where, path.rank, self._num_ranks, chunks)
            if self._where != "loop":
                sums[path.rank].append((self._weights(path, own), rest))
                continue
            everywhere = tuple(map(min, zip(*path.slots, strict=True)))  # the total work of all slots takes the same time for all cuts
            rest += self._scaled(everywhere)[-1]
            weights = {slot: self._scaled(_less(path.slots[slot], everywhere)) for slot in own}
            least = {slot: min(stop - start for start, stop in pairwise(weight)) for slot, weight in weights.items()}
            for slot, weight in weights.items():
                sums[slot].append(((Weight(weight, weight),), rest + sum(least.values()) - least[slot]))
        return sums

    def _weights(self, path: RankPath, own: Sequence[int]) -> tuple[Weight, ...]:
        """A path as weights of its rank's spans, without transfers.

        The slots before, between and after the rank's own have equal counts on a path, so their time follows from the positions at which
        the rank's own slots end. Slots before and between are counted with the span after them, and slots after all of them with the last
        span, whose weight is never negative.
        """
        found, outside = [], path.slots[own[0] - 1] if own[0] else self._never
        for slot in own:
            behind = path.slots[slot + 1] if slot + 1 < self._num_slots and slot + 1 not in own else self._never
            down = self._scaled(_less(path.slots[slot], outside))
            up = self._scaled(_less(path.slots[slot], behind))
            if slot == own[-1]:
                after = self._scaled(behind)[-1]
                up = [size + after for size in up]
            found.append(Weight(up, down))
            outside = behind
        return tuple(found)

    def _scaled(self, often: Sequence[int], slot: int | None = None) -> list[int]:
        """Time of all layers before each one, with the given counts of each part.

        Times are those of one slot's device, or the smallest over the slots if no slot is given.
        """
        columns = self._before if slot is None else [of_slot[slot] for of_slot in self._own]
        return [sum(map(mul, often, sizes)) for sizes in zip(*columns, strict=True)]

    def _mean(self) -> int:
        sums = []
        for path in self._paths:
            at = {slot: self._scaled(times, slot) for slot, times in enumerate(path.slots) if any(times)}
            sums.append(SlotSum(at, path.transfers * self._p2p))
        return mean_bound(sums, self._num_slots, self._num_layers, self._rules)


def _less(one: RunCounts, other: Sequence[int]) -> RunCounts:
    return tuple(map(sub, one, other))


@lru_cache(maxsize=4096)
def mean_path(
    kind: str, pp: int, vpp: int, count: int, paces: tuple[int, ...] | None = None, *, turns: bool = False
) -> tuple[SlotNumbers, int]:
    """Counts of each part on each slot of a mean path of a schedule, and the divisor of their sum.

    `paces` are the model's times on the device of each slot, in any unit; None means equal. `turns`: pairs take turns.
    """
    paths = schedule_paths(kind, pp, vpp, count, turns=turns)
    sizes = [[pace * sum(numbers) for pace, numbers in zip(paces or (1,) * (pp * vpp), path.slots, strict=True)] for path in paths]
    slots, mixed, often = range(pp * vpp), [0] * (pp * vpp), [0] * len(paths)
    loads = [0] * len(paths)
    best, chosen_often = -1.0, often
    chosen = max(range(len(paths)), key=lambda index: sum(sizes[index]))
    for turn in range(1, PATH_TURNS + 1):
        often[chosen] += 1
        mixed = list(map(add, mixed, sizes[chosen]))
        slot = min(slots, key=mixed.__getitem__)
        if mixed[slot] / turn > best:
            best, chosen_often = mixed[slot] / turn, often.copy()
        loads = [load + size[slot] for load, size in zip(loads, sizes, strict=True)]
        chosen = max(range(len(paths)), key=loads.__getitem__)
    numbers = [[0] * len(each) for each in paths[0].slots]
    for path, number in zip(paths, chosen_often, strict=True):
        if number:
            for found, slot_times in zip(numbers, path.slots, strict=True):
                for part, times in enumerate(slot_times):
                    found[part] += number * times
    return tuple(map(tuple, numbers)), sum(chosen_often)


def at_slot(numbers: SlotNumbers, slot: int, time: LayerTime) -> int:
    """Time that an end of the model adds on its slot, before division by the mean's divisor."""
    return _added((numbers[slot],), time)[0]


def least_on_slots(numbers: SlotNumbers, time: LayerTime) -> int:
    """The least time that a layer adds on any slot, before division by the mean's divisor."""
    return min(_added(numbers, time))


def _added(numbers: SlotNumbers, time: LayerTime) -> list[int]:
    """Time that a layer adds on each slot."""
    forward, backward, weight = time.forward_ns, time.input_ns, time.weight_ns
    if len(numbers[0]) == len(PARTS):
        return [f * forward + i * backward + w * weight for f, i, w in numbers]
    sizes = [getattr(time, part) for part in TURN_PARTS]
    return [sum(map(mul, each, sizes)) for each in numbers]


def filled(total: int, pp: int, count: int) -> int:
    """Bound on the step of 1F1B and GPipe: T ≥ W / (1 − (1 − 1/m)^p), where W is the time of one microbatch on all p ranks.

    A rank's m microbatches come after the forwards of the ranks before it and before their backwards: m · t_r + Σ_{s < r} t_s ≤ T. The
    largest Σ t_r that this allows is T (1 − (1 − 1/m)^p).
    """
    whole, left = count**pp, (count - 1) ** pp
    return int(-(-total * whole // (whole - left)))


def packed(at: Sequence[int], pp: int, count: int, hop: int = 0) -> int:
    """Bound on the step of 1F1B and GPipe for whole layers: each rank r has m · t_r + Σ_{s < r} (t_s + 2 · hop) ≤ T.

    A rank whose layers begin at i takes them up to the furthest j with m · P_j − (m − 1) · P_i + 2 r · hop ≤ T. A longer span of one rank
    lets the next end later, so T suffices if ranks with the longest possible spans reach the end.

    Args:
        at: Nanoseconds P of F, I and W of one microbatch, summed over the layers before each possible cut and over the model.
        pp: Ranks.
        count: Microbatches m.
        hop: Time of a boundary tensor between two ranks.
    """
    last = len(at) - 1

    def reaches(limit: int) -> bool:
        begin = 0
        for rank in range(pp):
            begin = max(0, bisect_right(at, (limit - 2 * rank * hop + (count - 1) * at[begin]) // count) - 1)
            if begin == last:
                return True
        return False

    low = count * -(-at[-1] // pp) - 1  # too small, or the bound of an even share
    high = count * at[-1]
    while high - low > 1 + low // PACKED_PARTS:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return low + 1
