"""The forwards of a chunk's blocks on the tape (`megaplan.budget.tape`): what each allocates, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from megaplan.blocks.ops import OUTPUT, runs_bank
from megaplan.budget.tape import CRITERION, Point, between, largest, point_of
from megaplan.budget.unit import Unit
from megaplan.hosts.megarun.program import LiveSet, Replay
from megaplan.hosts.megarun.storage import BlockStorage
from megaplan.tuples import new


class ForwardSegment(NamedTuple):
    """A block's forward.

    Attributes:
        gather: Copies out of its all-gather, on top of the output gathered before it; None if nothing is gathered.
        run: The largest point of its operations.
        left: Gathered parameters and kept parts that it leaves, less those that it found.
        flat_bytes: All-gather output that stays until the next one is copied out.
    """

    gather: Point | None
    run: Point
    left: int
    flat_bytes: int


def forward_segment(unit: Unit, *, gathers: bool, frees: bool, ahead: bool, again: bool = False) -> ForwardSegment:
    """A block's forward.

    Args:
        unit: The block.
        gathers: True if its layer is gathered for it.
        frees: True if the layer is freed after it.
        ahead: True if each layer's forward begins by gathering the next layer.
        again: True if it is gathered from parts that are kept, and freed then.
    """
    block, storage, own = unit.block, unit.storage, unit.gathered_bytes
    found = unit.part_bytes * again
    gather, flat_bytes = None, -1
    if gathers and unit.layer and storage is not None:
        dense, experts = storage.dense, storage.experts
        copying = own - experts.gathered_bytes + dense.flat_bytes + dense.casting_bytes + (experts.flat_bytes if ahead else 0)
        gather = between("gathering of {}", 0, copying, unit.input_bytes)
        flat_bytes = experts.flat_bytes if unit.has_experts else dense.flat_bytes
    left = own * (gathers - frees) + unit.part_bytes * frees - found
    if unit.has_experts and (gathers or frees):
        points = [
            point_of(unit, "forward of {}", live, c=gathered, a=unit.passing_bytes)
            for live, gathered in _around_experts(unit, gathers=gathers, frees=frees, ahead=ahead, again=again)
        ]
        run = largest(points[::-1])
    else:
        gathered = own - found if gathers else 0
        run = point_of(unit, "forward of {}", block.forward, (), block.forward_bytes, 0, gathered, unit.passing_bytes)
    if frees and unit.part_bytes and storage is not None:
        run = largest([run, _cut(unit, storage, own * gathers - found)])
    return new(ForwardSegment, (gather, run, left, flat_bytes))


def loss_points(unit: Unit) -> tuple[tuple[Point, bool], ...]:
    """The largest points of the head's forward, each with True if it is in the stage: FSDP2 frees the last output when that returns."""
    if CRITERION not in unit.segments:
        halves = [[live for live in unit.block.part.replay.forward if (live.op != CRITERION) is inside] for inside in (True, False)]
        points = [[point_of(unit, "forward of {}", live, a=unit.passing_bytes) for live in half[::-1]] for half in halves]
        unit.segments[CRITERION] = tuple((largest(half), inside) for half, inside in zip(points, (True, False), strict=True) if half)
    found: tuple[tuple[Point, bool], ...] = unit.segments[CRITERION]
    return found


def _cut(unit: Unit, storage: BlockStorage, gathered: int) -> Point:
    """The point after a layer's forward at which parts of its parameters are copied, those of its bank before."""
    kept = tuple([name for name, _ in unit.block.part.replay.saved])
    live = LiveSet("", tuple(dict.fromkeys((*kept, OUTPUT))) if OUTPUT in unit.block.part.tensors else kept)
    bank = storage.experts.part_bytes - storage.experts.gathered_bytes
    return point_of(unit, "parts of {} for its backward", live, c=gathered + bank + storage.dense.cutting_bytes, a=unit.passing_bytes)


def _around_experts(unit: Unit, *, gathers: bool, frees: bool, ahead: bool, again: bool) -> Iterator[tuple[LiveSet, int]]:
    """Points of a forward of a layer with experts, and gathered parameters then, without the output that stays after it.

    Experts are allocated from their operation on. The output from which they are copied is allocated from the start if it is gathered
    ahead; that of the layer's other parameters is allocated until they have been copied.
    """
    if unit.storage is None:
        return
    dense, experts, own = unit.storage.dense, unit.storage.experts, unit.gathered_bytes
    gathered = own - experts.gathered_bytes + dense.flat_bytes - (0 if ahead else experts.flat_bytes) if gathers else 0
    gathered -= dense.part_bytes * again
    own -= dense.part_bytes * again
    before = unit.block.part.replay.forward[0]
    for live in unit.block.part.replay.forward:
        fills = runs_bank(live.op)
        if fills and gathers:  # tensors of the operation before are allocated while they are copied for this one
            start = LiveSet(live.op, tuple(name for name in before.storages if name in live.storages))
            yield start, own + experts.casting_bytes + dense.flat_bytes
            gathered = own - experts.part_bytes * again
        yield live, gathered
        if fills and frees:
            if experts.cutting_bytes:
                yield after_bank(unit.block.part.replay), gathered + experts.cutting_bytes
            gathered += experts.part_bytes - experts.gathered_bytes
        before = live


@cache
def after_bank(run: Replay) -> LiveSet:
    """The live set when the experts' operation of a forward has returned."""
    index = next(index for index, point in enumerate(run.forward) if runs_bank(point.op))
    left = frozenset(run.forward[index + 1].storages)
    return LiveSet("", tuple([name for name in run.forward[index].storages if name in left]))
