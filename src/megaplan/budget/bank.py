"""A layer's experts are a group of their own: gathered for their operation alone, their gradients made at one moment of its backward."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.budget.unit import Unit
from megaplan.hosts.megarun.program import Moment


def fetching_experts(unit: Unit, flat: int, *, ahead: bool) -> Iterator[tuple[Moment, int, int]]:
    """Moments of a layer's forward that gathers the experts and frees them, with their bytes and what is gathered.

    The bank is there while its operation runs; the flat output it was gathered into stays until the next group gathers, and is there
    from the start where it is gathered ahead.

    Args:
        unit: The layer.
        flat: All-gather outputs alive in its forward.
        ahead: Whether each layer's forward begins by gathering the next layer.
    """
    if unit.storage is None:
        return
    dense, experts = unit.storage.dense, unit.storage.experts
    flat_bytes = flat + dense.flat_bytes - (0 if ahead else experts.flat_bytes)
    before = unit.block.part.replay.forward[0]
    for moment in unit.block.part.replay.forward:
        runs = moment.op == "experts"
        if runs:  # copied out beside the output of the group gathered before
            start = Moment(moment.op, tuple(name for name in before.storages if name in moment.storages))
            gathered = dense.gathered_bytes + experts.gathered_bytes + flat + dense.flat_bytes
            yield start, unit.block.moment_bytes(start, ()), gathered
        before, flat_bytes = moment, flat if runs else flat_bytes
        yield moment, unit.block.moment_bytes(moment, ()), dense.gathered_bytes + flat_bytes + (experts.gathered_bytes if runs else 0)


def freeing_experts(unit: Unit, gathered: int) -> Iterator[tuple[Moment, int, int]]:
    """Moments of a layer's forward that finds the experts gathered and frees them after their operation.

    Args:
        unit: The layer.
        gathered: Gathered parameters when it begins, its own included.
    """
    for moment in unit.block.part.replay.forward:
        yield moment, unit.block.moment_bytes(moment, ()), gathered
        if moment.op == "experts" and unit.storage is not None:
            gathered -= unit.storage.experts.gathered_bytes


def largest_with_bank(unit: Unit) -> Moment:
    """The largest moment of a layer's backward at which its bank's gradients are as autograd made them, or are not made yet."""
    behind, block = behind_experts(unit), unit.block
    if all(moment is not block.backward for moment in behind):
        return block.backward
    before = block.part.replay.backward[: -len(behind)]
    return max(before, key=lambda moment: block.moment_bytes(moment, moment.params))


def behind_experts(unit: Unit) -> tuple[Moment, ...]:
    """The moments of a layer's backward after that of its bank."""
    moments = unit.block.part.replay.backward
    return moments[next(i for i, found in enumerate(moments) if found.op == "experts") + 1 :]


def without_bank(moment: Moment) -> tuple[str, ...]:
    """Parameter gradients of a moment, but for the bank's."""
    return tuple(name for name in moment.params if not name.startswith("experts."))
