"""A layer's experts have their own group: gathered for their operation only, their gradients made at one point of its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from megaplan.blocks.ops import in_bank, runs_bank
from megaplan.budget.unit import BankMoments, Unit
from megaplan.hosts.megarun.parts import BlockBytes
from megaplan.hosts.megarun.program import LiveSet, Replay, largest_moments
from megaplan.tuples import new


class ForwardMoment(NamedTuple):
    """A point of a layer's forward with its bytes; for the experts' operation also the point at which their bank is filled.

    Attributes:
        moment: Point while an operation runs.
        moment_bytes: Allocated bytes then.
        start: Tensors of the operation before that are allocated while the bank is filled; None for an operation without a bank.
        start_bytes: Allocated bytes then.
    """

    moment: LiveSet
    moment_bytes: int
    start: LiveSet | None
    start_bytes: int


def forward_moments(block: BlockBytes) -> list[ForwardMoment]:
    """Points of a layer with experts; layers of one block share them."""
    found, before = list[ForwardMoment](), block.part.replay.forward[0]
    for moment in block.part.replay.forward:
        start = _start_of(moment, before) if runs_bank(moment.op) else None
        found.append(ForwardMoment(moment, block.moment_bytes(moment, ()), start, block.moment_bytes(start, ()) if start else 0))
        before = moment
    return found


def fetching_experts(
    unit: Unit, moments: Sequence[ForwardMoment], gathered: int, flat: int, *, ahead: bool, frees: bool
) -> Iterator[tuple[LiveSet, int, int]]:
    """Points of a layer's forward that gathers the experts, with their bytes and gathered parameters.

    The bank is allocated from its operation on. The flat output from which it is copied stays until the next group gathers, and is
    allocated from the start if it is gathered ahead; that of the layer's other parameters is allocated until the bank has been filled.

    Args:
        unit: The layer.
        moments: Points of its forward.
        gathered: Gathered parameters without its experts.
        flat: All-gather outputs during its forward, without that of its other parameters.
        ahead: True if each layer's forward begins by gathering the next layer.
        frees: True if the experts are freed after their operation.
    """
    if unit.storage is None:
        return
    dense, experts = unit.storage.dense, unit.storage.experts
    flat_bytes = flat + dense.flat_bytes - (0 if ahead else experts.flat_bytes)
    for moment, moment_bytes, start, start_bytes in moments:
        if start is not None:  # copied out while the output of the group gathered before is allocated
            yield start, start_bytes, gathered + experts.gathered_bytes + experts.casting_bytes + flat + dense.flat_bytes
            flat_bytes = flat
            gathered += experts.gathered_bytes
        yield moment, moment_bytes, gathered + flat_bytes
        if start is not None and frees:
            gathered -= experts.gathered_bytes


def freeing_experts(unit: Unit, moments: Sequence[ForwardMoment], gathered: int) -> Iterator[tuple[LiveSet, int, int]]:
    """Points of a layer's forward that finds the experts gathered and frees them after their operation.

    Args:
        unit: The layer.
        moments: Points of its forward.
        gathered: Gathered parameters at its start, its own included.
    """
    for moment, moment_bytes, start, _ in moments:
        yield moment, moment_bytes, gathered
        if start is not None and unit.storage is not None:
            gathered -= unit.storage.experts.gathered_bytes


def _start_of(moment: LiveSet, before: LiveSet) -> LiveSet:
    """Tensors of the operation before that are allocated when the bank is filled for this one."""
    return LiveSet(moment.op, tuple(name for name in before.storages if name in moment.storages))


def bank_moments(block: BlockBytes) -> BankMoments:
    """The largest points of the backward of a layer with experts."""
    found = _candidates(block.part.replay)
    early, _, early_bytes = _largest(block, found.before)
    last, last_params, last_bytes = _largest(block, found.later)
    during, taken = block.moment_bytes(found.during, found.during.params), block.moment_bytes(*found.taken)
    return new(BankMoments, (early, early_bytes, found.during, during, *found.taken, taken, last, last_params, last_bytes))


def moments_around_bank(block: BlockBytes, *, again: bool) -> tuple[tuple[LiveSet, int], tuple[LiveSet, int]]:
    """The largest point before the bank's operation and the largest from it on, if FSDP2 does not take the bank's gradients.

    Args:
        block: Block of a layer with experts.
        again: True if gradients are added in place to earlier ones, so that only a point's new ones count.
    """
    moments = [(moment, block.moment_bytes(moment, moment.new_params if again else moment.params)) for moment in block.part.replay.backward]
    bank = _bank_index(block.part.replay)
    early = moments[:bank] or [(before := moments[bank][0].before(), block.moment_bytes(before, ()))]
    return max(early, key=lambda found: found[1]), max(moments[bank:], key=lambda found: found[1])


def _bank_index(run: Replay) -> int:
    return next(index for index, moment in enumerate(run.backward) if runs_bank(moment.op))


_Held = tuple[LiveSet, tuple[str, ...]]
"""A point, and its parameter gradients that count."""


class _PeakCandidates(NamedTuple):
    """The points that can be the largest before the bank's operation, that one, the one just after it, and those that can be later."""

    before: tuple[_Held, ...]
    during: LiveSet
    taken: _Held
    later: tuple[_Held, ...]


def _largest(block: BlockBytes, moments: tuple[_Held, ...]) -> tuple[LiveSet, tuple[str, ...], int]:
    largest, largest_bytes = moments[0], -1
    for held in moments:
        size = block.moment_bytes(*held)
        if size > largest_bytes:
            largest, largest_bytes = held, size
    return (*largest, largest_bytes)


@cache
def _candidates(run: Replay) -> _PeakCandidates:
    bank = _bank_index(run)
    early = run.backward[:bank] or (run.backward[bank].before(),)
    taken = run.backward[bank + 1].before()
    later = largest_moments(run.backward[bank + 1 :], _without_bank)
    return _PeakCandidates(
        tuple((moment, moment.params) for moment in largest_moments(early, lambda moment: moment.params)),
        run.backward[bank],
        (taken, _without_bank(taken)),
        tuple((moment, _without_bank(moment)) for moment in later),
    )


def _without_bank(moment: LiveSet) -> tuple[str, ...]:
    return tuple(name for name in moment.params if not in_bank(name))
