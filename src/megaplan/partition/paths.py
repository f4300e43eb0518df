"""Paths through a step: chains of actions that run in sequence for all cuts, so that a step is never shorter than a path.

A path enters a rank's own order at one of two actions and leaves it at one of two.

- It enters at the first action, which waits for the forwards of the earlier slots; or at the first backward, which waits for one
  microbatch's forward through all slots and its backward down to the rank.
- It leaves at the last action; or at the last backward, which one microbatch's backward follows down to slot 0.

In between the rank runs its order without a pause. The length of a path is a sum over slots of F, I and W times integers.

If the parts of a pair take turns and a path has both, each counts without its exchanges of rows, which may be hidden; computations never
are. Outside the rank's own order a path contains one part of a pair, with its full time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul

from megaplan.cost.values import LayerTime, ModelTimes, once_a_device
from megaplan.schedules import SPLIT_BACKWARD, actions, cut_pipeline, placement
from megaplan.schedules.actions import ActionKind, Orders, ScheduleStep, computations
from megaplan.schedules.placement import Placement, slot_owner

PARTS = ("forward_ns", "input_ns", "weight_ns")
"""F, I and W with their field names in the times."""
TURN_PARTS = ("forward_compute_ns", "input_compute_ns", "weight_ns", "forward_exchange_ns", "input_exchange_ns")
"""The same if pairs take turns: F and I without exchanges of rows, W, and the exchanges of F and of I."""
RunCounts = tuple[int, ...]
"""Number of runs of each part of a slot on a path; an unsplit backward runs I and W."""


@dataclass(frozen=True, slots=True)
class RankPath:
    """A chain through one rank.

    Attributes:
        rank: Rank whose order it follows.
        slots: Runs of each of `PARTS`, or of `TURN_PARTS`, on each slot.
        transfers: Boundary tensors that it waits for.
    """

    rank: int
    slots: tuple[RunCounts, ...]
    transfers: int

    def length(self, *times: Sequence[int], p2p: int) -> int:
        """Length of the path for given times of the slots, part by part."""
        return self.transfers * p2p + sum(sum(map(mul, *each)) for each in zip(self.slots, zip(*times, strict=True), strict=True))


@lru_cache(maxsize=512)
def schedule_paths(kind: str, pp: int, vpp: int, count: int, *, turns: bool = False) -> tuple[RankPath, ...]:
    """The paths of a schedule, or of the pipeline that has its cuts; cached because specs with the same schedule share them."""
    kind, pp, vpp, count = cut_pipeline(kind, pp, vpp, count)
    return paths_of(actions(kind, pp, vpp, count), placement(kind), vpp, whole=kind not in SPLIT_BACKWARD, turns=turns)


def paths_of(orders: Orders, where: Placement, vpp: int, *, whole: bool, turns: bool = False) -> tuple[RankPath, ...]:
    """The paths of every rank, without paths that another one of the rank exceeds in every slot.

    Args:
        orders: Action order of each rank.
        where: Placement.
        vpp: Slots per rank.
        whole: True if backwards are never split, so that W of the slots in between runs too.
        turns: True if pairs take turns.
    """
    pp = len(orders)
    owners = [slot_owner(where, slot, pp)[0] for slot in range(pp * vpp)]
    found: list[RankPath] = []
    for rank, order in enumerate(orders):
        mine = list(dict.fromkeys(_paths(rank, order, owners, whole=whole, turns=turns)))
        found += [path for path in mine if not any(other is not path and _exceeds(other, path) for other in mine)]
    return tuple(found)


def _paths(rank: int, steps: tuple[ScheduleStep, ...], owners: Sequence[int], *, whole: bool, turns: bool) -> Iterator[RankPath]:
    order, times = tuple(computations(steps)), _TURN_TIMES if turns else _TIMES
    partners = _partners(steps) if turns else [-1] * len(order)
    num_slots, up, down = len(owners), times[ActionKind.FORWARD, False], times[ActionKind.BACKWARD if whole else ActionKind.INPUT, False]
    backwards = [index for index, action in enumerate(order) if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT)]
    hops = [int(one != other) for one, other in pairwise(owners)]
    for enters in (0, backwards[0]):
        for leaves in (len(order) - 1, backwards[-1]):
            counts = [[0] * len(up) for _ in range(num_slots)]
            transfers = 0
            into, out = order[enters], order[leaves]
            if enters == 0:
                for slot in range(into.slot):
                    _add(counts[slot], up)
                    transfers += hops[slot]
            else:
                for slot in range(num_slots):
                    _add(counts[slot], up)
                    if slot > into.slot:
                        _add(counts[slot], down)
                transfers += sum(hops) + sum(hops[into.slot :])
            part = zip(order[enters : leaves + 1], partners[enters : leaves + 1], strict=True)
            runs = Counter([(action.kind, action.slot, enters <= partner <= leaves) for action, partner in part])
            for (kind, slot, paired), number in runs.items():
                _add(counts[slot], [each * number for each in times[kind, paired]])
            if leaves == backwards[-1]:
                for slot in range(out.slot):
                    _add(counts[slot], down)
                transfers += sum(hops[: out.slot])
            yield RankPath(rank, tuple(map(tuple, counts)), transfers)


def _partners(steps: Iterable[ScheduleStep]) -> list[int]:
    """The index of the other part of its pair, or −1, for every computation of an order."""
    found: list[int] = []
    for step in steps:
        found += [len(found) + 1, len(found)] if len(step.parts) > 1 else [-1]
    return found


_TIMES: dict[tuple[ActionKind, bool], RunCounts] = {
    (ActionKind.FORWARD, False): (1, 0, 0),
    (ActionKind.INPUT, False): (0, 1, 0),
    (ActionKind.WEIGHT, False): (0, 0, 1),
    (ActionKind.BACKWARD, False): (0, 1, 1),
}
_TURN_TIMES: dict[tuple[ActionKind, bool], RunCounts] = {
    **{(kind, False): (*runs, *runs[:2]) for (kind, _), runs in _TIMES.items()},
    (ActionKind.FORWARD, True): (1, 0, 0, 0, 0),
    (ActionKind.BACKWARD, True): (0, 1, 1, 0, 0),
}
"""Runs of an action of `PARTS`, and of `TURN_PARTS`: alone, or with the other part of its pair."""


def _add(counts: list[int], times: Sequence[int]) -> None:
    for index, number in enumerate(times):
        counts[index] += number


def _exceeds(one: RankPath, other: RankPath) -> bool:
    pairs = zip(one.slots, other.slots, strict=True)
    return one.transfers >= other.transfers and all(a >= b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def parts_of(times: ModelTimes) -> tuple[str, ...]:
    """The parts of a path with these times."""
    return TURN_PARTS if times.in_turns else PARTS


def before(times: ModelTimes, part: str) -> list[int]:
    """Time of all layers before each one; the ends are added to the first and the last layer."""

    def of(time: LayerTime) -> int:
        return int(getattr(time, part))

    found = [0, *(of(times.first) + size for size in accumulate(map(of, times.layers)))]
    found[-1] += of(times.last)
    return found


def before_slots(times: Sequence[ModelTimes], part: str) -> list[list[int]]:
    """`before` for each slot, by the times of its own device."""
    return once_a_device(times, lambda each: before(each, part))
