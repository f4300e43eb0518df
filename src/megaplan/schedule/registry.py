"""Schedules by name. A new one is a file with `problems`, `orders` and perhaps `enough_microbatches`, and an entry of `_GENERATORS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megaplan.errors import Diagnostic, MegaplanError
from megaplan.schedule import dualpipev, gpipe, interleaved, interleaved_zero_bubble, looped_bfs, one_f_one_b, zbv
from megaplan.schedule.actions import Orders
from megaplan.schedule.placement import Placement
from megaplan.schedule.problems import not_a_schedule


@dataclass(frozen=True, slots=True)
class _Generator:
    """One schedule: how it lays slots over ranks, and functions of (pp, vpp, microbatches).

    `enough_microbatches` is a number of microbatches with all the moments of more (`megaplan.schedule.moments`).
    """

    placement: Placement
    problems: Callable[[int, int, int], list[Diagnostic]]
    orders: Callable[[int, int, int], Orders]
    enough_microbatches: Callable[[int, int, int], int] = lambda _pp, _vpp, num_microbatches: num_microbatches


_GENERATORS = {
    "gpipe": _Generator("single", gpipe.problems, gpipe.orders),
    "1f1b": _Generator("single", one_f_one_b.problems, one_f_one_b.orders, one_f_one_b.enough_microbatches),
    "interleaved_1f1b": _Generator("loop", interleaved.problems, interleaved.orders, interleaved.enough_microbatches),
    "looped_bfs": _Generator("loop", looped_bfs.problems, looped_bfs.orders),
    "interleaved_zero_bubble": _Generator(
        "loop", interleaved_zero_bubble.problems, interleaved_zero_bubble.orders, interleaved_zero_bubble.enough_microbatches
    ),
    "zbv": _Generator("v", zbv.problems, zbv.orders, zbv.enough_microbatches),
    "dualpipev": _Generator("v", dualpipev.problems, dualpipev.orders, dualpipev.enough_microbatches),
}
KINDS = tuple(_GENERATORS)
"""Every schedule, as `schedule.kind` names it."""
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules with actions I and W in place of some or all B."""


def placement(kind: str) -> Placement:
    """How a schedule lays slots over ranks.

    Raises:
        MegaplanError: MP310 for a kind that is no schedule.
    """
    if kind not in _GENERATORS:
        raise MegaplanError([not_a_schedule(kind, _GENERATORS)])
    return _GENERATORS[kind].placement


def schedule_problems(kind: str, pp: int, vpp: int, num_microbatches: int) -> list[Diagnostic]:
    """Why the schedule cannot run on these degrees (MP310 … MP313); empty if it can."""
    generator = _GENERATORS.get(kind)
    return generator.problems(pp, vpp, num_microbatches) if generator else [not_a_schedule(kind, _GENERATORS)]


def enough_microbatches(kind: str, pp: int, vpp: int, num_microbatches: int) -> int:
    """Microbatches after which a schedule's orders only repeat themselves: fewer actions with the same moments.

    Raises:
        MegaplanError: MP310 for a kind that is no schedule; MP311 … MP313 if it cannot run on these degrees.
    """
    if found := schedule_problems(kind, pp, vpp, num_microbatches):
        raise MegaplanError(found)
    return _GENERATORS[kind].enough_microbatches(pp, vpp, num_microbatches)


def actions(kind: str, pp: int, vpp: int, num_microbatches: int) -> Orders:
    """What every pp rank computes, in order; megarun compares torch's schedule object with it before the first step.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots a rank.
        num_microbatches: Microbatches of one optimizer step.

    Returns:
        For each pp rank its actions. Waits are not part of an order.

    Raises:
        MegaplanError: MP310 for a kind that is no schedule; MP311 … MP313 if it cannot run on these degrees.
    """
    if found := schedule_problems(kind, pp, vpp, num_microbatches):
        raise MegaplanError(found)
    return _GENERATORS[kind].orders(pp, vpp, num_microbatches)
