"""FSDP2's all-gathers: their buffers during a forward and during a backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megaplan.blocks.ops import runs_bank
from megaplan.budget.unit import Unit
from megaplan.families.moe.program import INSIDE_BACKWARD
from megaplan.hosts.megarun.program import LiveSet
from megaplan.hosts.megarun.storage import BlockStorage


class AllGathers(NamedTuple):
    """Bytes of all-gather outputs by unit: while it runs, and while a layer's parameters are copied out of its own."""

    running: Sequence[int]
    starting: Sequence[int]


NO_ALL_GATHERS = AllGathers((), ())


def all_gathers(units: Sequence[Unit], last: int, *, ahead: bool) -> AllGathers:
    """All-gather outputs of a forward over some units.

    Args:
        units: Units in execution order.
        last: Output of the group gathered before the first unit.
        ahead: True if each layer's forward begins by gathering the next layer; before the first layer all units wait for it.
    """
    running, starting = [], []
    alive = last  # the output of the group gathered last is freed when the next one's has been filled
    for index, unit in enumerate(units):
        start = 0
        if unit.layer and unit.storage is not None:
            dense, experts = unit.storage.dense.flat_bytes, unit.storage.experts.flat_bytes
            start = alive + dense + unit.storage.dense.casting_bytes + (experts if ahead else 0)
            alive = experts if unit.has_experts else dense
        next_layer = next((each.flat_bytes for each in units[index + 1 :] if each.layer), 0) if ahead else 0
        running.append(alive + next_layer)
        starting.append(start)
    return AllGathers(running, starting)


def backward_gathers(unit: Unit, before: BlockStorage | None, name: str, gathered: int) -> Iterator[tuple[LiveSet, int]]:
    """All-gathers in a unit's backward: allocated bytes of the unit, and the bytes of communication.

    A layer's own at its start, then its experts', each with the output that parameters are copied from; and that of the layer before, which
    follows either, with the cast of its shard. The last layer's follows the loss.

    Args:
        unit: Unit that runs.
        before: Storage of the layer before; None if there is none.
        name: Name of the unit.
        gathered: Gathered parameters of layers, its own included.
    """
    points, storage = unit.block.part.replay.backward, unit.storage
    ahead = before.dense.flat_bytes + before.dense.sent_bytes if before is not None and before.dense.sent_bytes else 0
    if not unit.layer or storage is None:
        if name == "head" and ahead:
            yield from [(point.before(), gathered + ahead) for point in points if point.op != "cross_entropy"][:1]
        return
    dense, experts = storage.dense, storage.experts
    alone = gathered - experts.gathered_bytes
    first, before_first = points[0], points[0].before()
    if name.startswith("mtp."):  # a depth's backward begins with its loss, a layer's with the addition, which makes nothing
        kept = dict(unit.block.part.replay.saved)
        first = before_first = before_first.without(each for each in before_first.storages if each not in kept)
    yield first, alone + dense.flat_bytes + dense.casting_bytes
    if not experts.gathered_bytes:
        if ahead:
            yield before_first, gathered + ahead
        return
    yield before_first, alone + experts.flat_bytes + experts.sent_bytes
    for point in points:
        if runs_bank(point.op):
            # the operation's scratch is not allocated yet
            yield point.before().without((INSIDE_BACKWARD,)), gathered + max(experts.flat_bytes + experts.casting_bytes, ahead)
