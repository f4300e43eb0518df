"""A bound of a replayed step for all cuts, from the paths through its schedule, in a few operations a layer.

A step is at least as long as each of its paths (`partition.paths`), and so as any weighted mean of them: a sum over slots of F, I and W
times the mean's numbers. Whatever the cuts, a layer is on some slot, so it adds at least the smallest of its terms over the slots. The
weights are those of a game between paths and slots, by fictitious play; they depend on the schedule alone, and any weights give a bound.

Source: G. W. Brown, Iterative solution of games by fictitious play, 1951.
"""

from __future__ import annotations

from functools import lru_cache

from megaplan.cost.times import LayerTime
from megaplan.partition.paths import Path, paths_of
from megaplan.schedules import SPLIT_BACKWARD, actions, placement

TURNS = 200
RATIO = (1, 1, 1)
"""F, I and W while weights are looked for."""
SlotNumbers = tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=4096)
def mean_path(kind: str, pp: int, vpp: int, count: int) -> tuple[SlotNumbers, int]:
    """For each slot, how often its F, I and W count, and the number to divide their sum by."""
    paths = paths_of(actions(kind, pp, vpp, count), placement(kind), vpp, whole=kind not in SPLIT_BACKWARD)
    sizes = [_weights(path) for path in paths]
    slots, mixed, times = range(pp * vpp), [0] * (pp * vpp), [0] * len(paths)
    loads = [0] * len(paths)
    best, chosen_times = -1.0, times
    chosen = max(range(len(paths)), key=lambda index: sum(sizes[index]))
    for turn in range(1, TURNS + 1):
        times[chosen] += 1
        mixed = [one + two for one, two in zip(mixed, sizes[chosen], strict=True)]
        slot = min(slots, key=mixed.__getitem__)
        if mixed[slot] / turn > best:
            best, chosen_times = mixed[slot] / turn, times.copy()
        loads = [load + size[slot] for load, size in zip(loads, sizes, strict=True)]
        chosen = max(range(len(paths)), key=loads.__getitem__)
    numbers = [[0, 0, 0] for _ in slots]
    for path, often in zip(paths, chosen_times, strict=True):
        if often:
            for found, slot_times in zip(numbers, path.slots, strict=True):
                for part, number in enumerate(slot_times):
                    found[part] += often * number
    return tuple((f, i, w) for f, i, w in numbers), sum(chosen_times)


def least(numbers: SlotNumbers, time: LayerTime) -> int:
    """The least that a layer adds, whatever slot it is on; to be divided by the mean's number."""
    forward, backward, weight = time.forward_ns, time.input_ns, time.weight_ns
    return min([f * forward + i * backward + w * weight for f, i, w in numbers])


def at_slot(numbers: SlotNumbers, slot: int, time: LayerTime) -> int:
    """What an end of the model adds on its slot."""
    f, i, w = numbers[slot]
    return f * time.forward_ns + i * time.input_ns + w * time.weight_ns


def _weights(path: Path) -> list[int]:
    return [sum(ratio * number for ratio, number in zip(RATIO, numbers, strict=True)) for numbers in path.slots]
