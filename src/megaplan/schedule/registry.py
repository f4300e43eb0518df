"""Schedules by name. A new one is a file with `problems` and `orders`, and one more entry of `_GENERATORS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megaplan.errors import Diagnostic, MegaplanError
from megaplan.schedule import interleaved, one_f_one_b
from megaplan.schedule.actions import Orders
from megaplan.schedule.placement import Placement
from megaplan.schedule.problems import not_available


@dataclass(frozen=True, slots=True)
class _Generator:
    problems: Callable[[int, int, int], list[Diagnostic]]
    orders: Callable[[int, int, int], Orders]


_GENERATORS = {
    "1f1b": _Generator(one_f_one_b.problems, one_f_one_b.orders),
    "interleaved_1f1b": _Generator(interleaved.problems, interleaved.orders),
}

_PLACEMENTS: dict[str, Placement] = {
    "gpipe": "single",
    "1f1b": "single",
    "interleaved_1f1b": "loop",
    "looped_bfs": "loop",
    "interleaved_zero_bubble": "loop",
    "zbv": "v",
    "dualpipev": "v",
}


def placement(kind: str) -> Placement:
    """How a schedule lays slots over ranks; known for every schedule of the spec, generated or not.

    Raises:
        MegaplanError: MP310 for a kind that is no schedule.
    """
    if kind not in _PLACEMENTS:
        raise MegaplanError([not_available(kind, _GENERATORS)])
    return _PLACEMENTS[kind]


def schedule_problems(kind: str, pp: int, vpp: int, num_microbatches: int) -> list[Diagnostic]:
    """Why the schedule cannot run on these degrees (MP310 … MP313); empty if it can."""
    generator = _GENERATORS.get(kind)
    return generator.problems(pp, vpp, num_microbatches) if generator else [not_available(kind, _GENERATORS)]


def actions(kind: str, pp: int, vpp: int, num_microbatches: int) -> Orders:
    """What every pp rank computes, in order; megarun compares torch's schedule object with it before the first step.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots a rank.
        num_microbatches: Microbatches of one optimizer step.

    Returns:
        For each pp rank its actions, 2 · vpp · num_microbatches of them. Waits are not part of an order.

    Raises:
        MegaplanError: The schedule is not generated yet, or cannot run on these degrees.
    """
    if found := schedule_problems(kind, pp, vpp, num_microbatches):
        raise MegaplanError(found)
    return _GENERATORS[kind].orders(pp, vpp, num_microbatches)
