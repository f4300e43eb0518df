"""Paths through a step: chains of actions that run in sequence for all cuts, so that a step is never shorter than a path.

A path enters a rank's own order at one of two actions and leaves it at one of two.

- It enters at the first action, which waits for the forwards of the slots before it; or at the first backward, which waits for one
  microbatch's forward through all slots and its backward down to the rank.
- It leaves at the last action; or at the last backward, which one microbatch's backward follows down to slot 0.

In between the rank runs its order without a pause. The length of a path is a sum over slots of F, I and W times integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter

from megaplan.cost.times import LayerTime, ModelTimes
from megaplan.schedules import SPLIT_BACKWARD, actions, cut_pipeline, placement
from megaplan.schedules.actions import Action, ActionKind, Orders, computations
from megaplan.schedules.placement import Placement, slot_owner

PARTS = ("forward_ns", "input_ns", "weight_ns")
"""F, I and W, by their names in times."""
RunCounts = tuple[int, int, int]
"""Number of runs of F, I and W of a slot on a path; a whole backward runs I and W."""


@dataclass(frozen=True, slots=True)
class RankPath:
    """A chain through one rank.

    Attributes:
        rank: Rank whose order it follows.
        slots: Runs of F, I and W on each slot.
        transfers: Boundary tensors that it waits for.
    """

    rank: int
    slots: tuple[RunCounts, ...]
    transfers: int

    def length(self, forward: Sequence[int], backward_input: Sequence[int], weight: Sequence[int], p2p: int) -> int:
        """Length of the path for given times of the slots."""
        times = zip(self.slots, forward, backward_input, weight, strict=True)
        return self.transfers * p2p + sum(f * nf + i * ni + w * nw for (nf, ni, nw), f, i, w in times)


@lru_cache(maxsize=512)
def schedule_paths(kind: str, pp: int, vpp: int, count: int) -> tuple[RankPath, ...]:
    """The paths of a schedule, or of the pipeline that has its cuts; cached because specs with the same schedule share them."""
    kind, pp, vpp, count = cut_pipeline(kind, pp, vpp, count)
    return paths_of(actions(kind, pp, vpp, count), placement(kind), vpp, whole=kind not in SPLIT_BACKWARD)


def paths_of(orders: Orders, where: Placement, vpp: int, *, whole: bool) -> tuple[RankPath, ...]:
    """The paths of every rank, without those that another path of the rank exceeds in every slot.

    Args:
        orders: Action order of each rank.
        where: Placement.
        vpp: Slots per rank.
        whole: True if backwards are always whole, so that W of the slots on the way down runs too.
    """
    pp = len(orders)
    owners = [slot_owner(where, slot, pp)[0] for slot in range(pp * vpp)]
    found: list[RankPath] = []
    for rank, order in enumerate(orders):
        mine = list(dict.fromkeys(_paths(rank, tuple(computations(order)), owners, whole=whole)))
        found += [path for path in mine if not any(other is not path and _exceeds(other, path) for other in mine)]
    return tuple(found)


def _paths(rank: int, order: Sequence[Action], owners: Sequence[int], *, whole: bool) -> Iterator[RankPath]:
    num_slots, down = len(owners), (0, 1, int(whole))
    backwards = [index for index, action in enumerate(order) if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT)]
    hops = [int(one != other) for one, other in pairwise(owners)]
    for enters in (0, backwards[0]):
        for leaves in (len(order) - 1, backwards[-1]):
            counts = [[0, 0, 0] for _ in range(num_slots)]
            transfers = 0
            into, out = order[enters], order[leaves]
            if enters == 0:
                for slot in range(into.slot):
                    counts[slot][0] += 1
                    transfers += hops[slot]
            else:
                for slot in range(num_slots):
                    counts[slot][0] += 1
                    if slot > into.slot:
                        _add(counts[slot], down)
                transfers += sum(hops) + sum(hops[into.slot :])
            for (kind, slot), number in Counter(map(itemgetter(0, 1), order[enters : leaves + 1])).items():
                f, i, w = _TIMES[kind]
                _add(counts[slot], (f * number, i * number, w * number))
            if leaves == backwards[-1]:
                for slot in range(out.slot):
                    _add(counts[slot], down)
                transfers += sum(hops[: out.slot])
            yield RankPath(rank, tuple((f, i, w) for f, i, w in counts), transfers)


_TIMES: dict[ActionKind, RunCounts] = {
    ActionKind.FORWARD: (1, 0, 0),
    ActionKind.INPUT: (0, 1, 0),
    ActionKind.WEIGHT: (0, 0, 1),
    ActionKind.BACKWARD: (0, 1, 1),
}


def _add(counts: list[int], times: RunCounts) -> None:
    for index, number in enumerate(times):
        counts[index] += number


def _exceeds(one: RankPath, other: RankPath) -> bool:
    pairs = zip(one.slots, other.slots, strict=True)
    return one.transfers >= other.transfers and all(a >= b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def before(times: ModelTimes, part: str) -> list[int]:
    """Time of all layers before each one; the ends are added to the first and the last layer."""

    def of(time: LayerTime) -> int:
        return int(getattr(time, part))

    found = [0, *(of(times.first) + size for size in accumulate(map(of, times.layers)))]
    found[-1] += of(times.last)
    return found


def before_slots(times: Sequence[ModelTimes], part: str) -> list[list[int]]:
    """`before` for each slot, by the times of its own device."""
    of_device = {id(each): before(each, part) for each in times}
    return [of_device[id(each)] for each in times]
