"""The outputs of FSDP2's all-gathers that are alive in a forward, before layers' parameters have been copied out of them and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.budget.unit import Unit


class AllGathers(NamedTuple):
    """Bytes of all-gather outputs, unit by unit: while it runs, and while a layer's parameters are copied out of its own."""

    running: Sequence[int]
    starting: Sequence[int]


NO_ALL_GATHERS = AllGathers((), ())


def all_gathers(units: Sequence[Unit], last: int, *, ahead: bool) -> AllGathers:
    """Those of a forward over some units.

    Args:
        units: In execution order.
        last: Output of the group gathered before the first of them.
        ahead: Whether each layer's forward begins by gathering the next layer; before the first layer all units wait for it.
    """
    running, starting = [], []
    alive = last  # the output of the group gathered last is freed when the next one's has been filled
    for index, unit in enumerate(units):
        start = 0
        if unit.layer and unit.storage is not None:
            dense, experts = unit.storage.dense.flat_bytes, unit.storage.experts.flat_bytes
            start = alive + dense + unit.storage.dense.casting_bytes + (experts if ahead else 0)
            alive = experts if unit.has_bank else dense
        following = units[index + 1 : index + 2] if unit.layer else units[index + 1 :]
        next_layer = next((each.flat_bytes for each in following if each.layer), 0) if ahead else 0
        running.append(alive + next_layer)
        starting.append(start)
    return AllGathers(running, starting)
