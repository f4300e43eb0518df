"""The forwards of a chunk's blocks on the tape (`megaplan.budget.tape`): the bytes that each allocates and leaves."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from megaplan.blocks.ops import OUTPUT, runs_bank
from megaplan.budget.tape import CRITERION, Point, between, largest, point_of
from megaplan.budget.unit import Unit
from megaplan.hosts.megarun.live_sets import LiveSet
from megaplan.hosts.megarun.program import Replay
from megaplan.tuples import new


class ForwardSegment(NamedTuple):
    """A block's forward.

    Attributes:
        gather: Copies out of its group's all-gather, in addition to the output gathered ahead; None if nothing is gathered before it.
        run: The largest point of its operations.
        left: Gathered parameters and kept parts that it leaves minus those present before.
        flat_bytes: All-gather output that stays until the next one is copied out; −1 for that found.
    """

    gather: Point | None
    run: Point
    left: int
    flat_bytes: int


class Gathers(NamedTuple):
    """Settings of a forward.

    Attributes:
        gathers: True if layers are gathered for it.
        frees: True if gathered parameters are freed after the forward.
        ahead: True if each unit's forward begins by gathering the next unit.
        again: True if they are gathered from parts that are kept, which are freed then.
        found_bytes: All-gather output that exists when a layer runs that is not the first of its group.
    """

    gathers: bool
    frees: bool
    ahead: bool
    again: bool
    found_bytes: int = 0


def forward_segment(unit: Unit, settings: Gathers) -> ForwardSegment:
    """A block's forward."""
    gathers, frees, ahead, again, _ = settings
    block, opens, closes, bank = unit.block, unit.opens, unit.closes, unit.bank
    own, found = opens.gathered_bytes + bank.gathered_bytes, (opens.part_bytes + bank.part_bytes) * again
    gather, flat_bytes = None, -1
    if gathers and unit.has_experts:
        flat_bytes = bank.flat_bytes
    if gathers and unit.layer and not unit.joins:
        copying = opens.gathered_bytes + opens.flat_bytes + opens.casting_bytes
        copying += sum([each.bank.flat_bytes for each in (unit, *unit.followers)]) if ahead else 0
        gather = between("gathering of {}", 0, copying, unit.input_bytes)
        flat_bytes = bank.flat_bytes if unit.has_experts else opens.flat_bytes
    freed, parts = closes.gathered_bytes + bank.gathered_bytes, closes.part_bytes + bank.part_bytes
    left = own * gathers - (freed - parts) * frees - found
    if unit.has_experts and (gathers or frees):
        points = [
            point_of(unit, "forward of {}", live, c=gathered, a=unit.passing_bytes) for live, gathered in _around_experts(unit, settings)
        ]
        run = largest(points[::-1])
    else:
        gathered = own - found if gathers else 0
        run = point_of(unit, "forward of {}", block.forward, (), block.forward_bytes, 0, gathered, unit.passing_bytes)
    if frees and parts:
        run = largest([run, _cut(unit, own * gathers - found)])
    return new(ForwardSegment, (gather, run, left, flat_bytes))


def loss_points(unit: Unit) -> tuple[tuple[Point, bool], ...]:
    """The largest points of the head's forward, each with True if it is in the stage.

    FSDP2 frees the last all-gather output when the stage returns.
    """
    if CRITERION not in unit.segments:
        halves = [[live for live in unit.block.part.replay.forward if (live.op != CRITERION) is inside] for inside in (True, False)]
        points = [[point_of(unit, "forward of {}", live, a=unit.passing_bytes) for live in half[::-1]] for half in halves]
        unit.segments[CRITERION] = tuple((largest(half), inside) for half, inside in zip(points, (True, False), strict=True) if half)
    found: tuple[tuple[Point, bool], ...] = unit.segments[CRITERION]
    return found


def _cut(unit: Unit, gathered: int) -> Point:
    """The point after a layer's forward at which parts of its group's parameters are copied; the bank's were copied before."""
    kept = tuple([name for name, _ in unit.block.part.replay.saved])
    live = LiveSet("", tuple(dict.fromkeys((*kept, OUTPUT))) if OUTPUT in unit.block.part.tensors else kept)
    bank = unit.bank.part_bytes - unit.bank.gathered_bytes
    return point_of(unit, "parts of {} for its backward", live, c=gathered + bank + unit.closes.cutting_bytes, a=unit.passing_bytes)


def _around_experts(unit: Unit, settings: Gathers) -> Iterator[tuple[LiveSet, int]]:
    """Points of the forward of a layer with experts, with the gathered parameters at each, without the output that stays after it.

    The experts' gathered parameters are allocated from their operation on. The all-gather output from which they are copied is allocated
    from the start if it is gathered ahead; the output of the group that was gathered before them is allocated until they have been copied.
    """
    gathers, frees, ahead, again, found_bytes = settings
    opens, experts = unit.opens, unit.bank
    own, before_bank = opens.gathered_bytes + experts.gathered_bytes, found_bytes if unit.joins else opens.flat_bytes
    gathered = own - experts.gathered_bytes + before_bank - (0 if ahead else experts.flat_bytes) if gathers else 0
    gathered -= opens.part_bytes * again
    own -= opens.part_bytes * again
    before = unit.block.part.replay.forward[0]
    for live in unit.block.part.replay.forward:
        fills = runs_bank(live.op)
        if fills and gathers:  # the previous operation's tensors are still allocated while they are copied for this one
            start = LiveSet(live.op, tuple(name for name in before.storages if name in live.storages))
            yield start, own + experts.casting_bytes + before_bank
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
