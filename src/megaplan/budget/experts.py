"""A layer's experts have their own group: gathered for their operation only, their gradients made at one point of its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from megaplan.blocks.ops import in_bank, runs_bank
from megaplan.budget.unit import ExpertPoints, Unit
from megaplan.hosts.megarun.parts import BlockBytes
from megaplan.hosts.megarun.program import LiveSet, Replay, largest_points
from megaplan.tuples import new


class ForwardPoint(NamedTuple):
    """A point of a layer's forward with its bytes; for the experts' operation also the point at which their bank is filled.

    Attributes:
        point: Point while an operation runs.
        point_bytes: Allocated bytes then.
        start: Tensors of the operation before that are allocated while the bank is filled; None for an operation without a bank.
        start_bytes: Allocated bytes then.
    """

    point: LiveSet
    point_bytes: int
    start: LiveSet | None
    start_bytes: int


def forward_points(block: BlockBytes) -> list[ForwardPoint]:
    """Points of a layer with experts; layers of one block share them."""
    found, before = list[ForwardPoint](), block.part.replay.forward[0]
    for point in block.part.replay.forward:
        start = _start_of(point, before) if runs_bank(point.op) else None
        found.append(ForwardPoint(point, block.point_bytes(point, ()), start, block.point_bytes(start, ()) if start else 0))
        before = point
    return found


def fetching_experts(
    unit: Unit, points: Sequence[ForwardPoint], gathered: int, flat: int, *, ahead: bool, frees: bool
) -> Iterator[tuple[LiveSet, int, int]]:
    """Points of a layer's forward that gathers the experts, with their bytes and gathered parameters.

    The bank is allocated from its operation on. The flat output from which it is copied stays until the next group gathers, and is
    allocated from the start if it is gathered ahead; that of the layer's other parameters is allocated until the bank has been filled.

    Args:
        unit: The layer.
        points: Points of its forward.
        gathered: Gathered parameters without its experts.
        flat: All-gather outputs during its forward, without that of its other parameters.
        ahead: True if each layer's forward begins by gathering the next layer.
        frees: True if the experts are freed after their operation.
    """
    if unit.storage is None:
        return
    dense, experts = unit.storage.dense, unit.storage.experts
    flat_bytes = flat + dense.flat_bytes - (0 if ahead else experts.flat_bytes)
    for point, point_bytes, start, start_bytes in points:
        if start is not None:  # copied out while the output of the group gathered before is allocated
            yield start, start_bytes, gathered + experts.gathered_bytes + experts.casting_bytes + flat + dense.flat_bytes
            flat_bytes = flat
            gathered += experts.gathered_bytes
        yield point, point_bytes, gathered + flat_bytes
        if start is not None and frees:
            gathered -= experts.gathered_bytes


def freeing_experts(unit: Unit, points: Sequence[ForwardPoint], gathered: int) -> Iterator[tuple[LiveSet, int, int]]:
    """Points of a layer's forward that finds the experts gathered and frees them after their operation.

    Args:
        unit: The layer.
        points: Points of its forward.
        gathered: Gathered parameters at its start, its own included.
    """
    for point, point_bytes, start, _ in points:
        yield point, point_bytes, gathered
        if start is not None and unit.storage is not None:
            gathered -= unit.storage.experts.gathered_bytes


def _start_of(point: LiveSet, before: LiveSet) -> LiveSet:
    """Tensors of the operation before that are allocated when the bank is filled for this one."""
    return LiveSet(point.op, tuple(name for name in before.storages if name in point.storages))


def expert_points(block: BlockBytes) -> ExpertPoints:
    """The largest points of the backward of a layer with experts."""
    found = _candidates(block.part.replay)
    early, _, early_bytes = _largest(block, found.before)
    last, last_params, last_bytes = _largest(block, found.later)
    during, taken = block.point_bytes(found.during, found.during.params), block.point_bytes(*found.taken)
    return new(ExpertPoints, (early, early_bytes, found.during, during, *found.taken, taken, last, last_params, last_bytes))


def points_around_experts(block: BlockBytes, *, accumulates: bool) -> tuple[tuple[LiveSet, int], tuple[LiveSet, int]]:
    """The largest point before the bank's operation and the largest from it on, if FSDP2 does not take the bank's gradients.

    Args:
        block: Block of a layer with experts.
        accumulates: True if gradients are added in place to earlier ones, so that only a point's new ones count.
    """
    points = [(point, block.point_bytes(point, point.new_params if accumulates else point.params)) for point in block.part.replay.backward]
    bank = _bank_index(block.part.replay)
    early = points[:bank] or [(before := points[bank][0].before(), block.point_bytes(before, ()))]
    return max(early, key=lambda found: found[1]), max(points[bank:], key=lambda found: found[1])


def _bank_index(run: Replay) -> int:
    return next(index for index, point in enumerate(run.backward) if runs_bank(point.op))


_Held = tuple[LiveSet, tuple[str, ...]]
"""A point, and its parameter gradients that count."""


class _PeakCandidates(NamedTuple):
    """The points that can be the largest before the bank's operation, that one, the one just after it, and those that can be later."""

    before: tuple[_Held, ...]
    during: LiveSet
    taken: _Held
    later: tuple[_Held, ...]


def _largest(block: BlockBytes, points: tuple[_Held, ...]) -> tuple[LiveSet, tuple[str, ...], int]:
    largest, largest_bytes = points[0], -1
    for held in points:
        size = block.point_bytes(*held)
        if size > largest_bytes:
            largest, largest_bytes = held, size
    return (*largest, largest_bytes)


@cache
def _candidates(run: Replay) -> _PeakCandidates:
    bank = _bank_index(run)
    early = run.backward[:bank] or (run.backward[bank].before(),)
    taken = run.backward[bank + 1].before()
    later = largest_points(run.backward[bank + 1 :], _without_bank)
    return _PeakCandidates(
        tuple((point, point.params) for point in largest_points(early, lambda point: point.params)),
        run.backward[bank],
        (taken, _without_bank(taken)),
        tuple((point, _without_bank(point)) for point in later),
    )


def _without_bank(point: LiveSet) -> tuple[str, ...]:
    return tuple(name for name in point.params if not in_bank(name))
