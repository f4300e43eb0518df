"""Schedules by name. A new one is a file with `problems`, `orders` and optionally `enough_microbatches`, and an entry of `SCHEDULES`."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from megaplan.errors import MegaplanError
from megaplan.schedules import dualpipe, dualpipev, gpipe, interleaved, interleaved_zero_bubble, looped_bfs, one_f_one_b, paired_1f1b, zbv
from megaplan.schedules.actions import Orders
from megaplan.schedules.placement import Placement, num_copies
from megaplan.schedules.problems import Problem, not_a_schedule, several_ranks


class RegisteredSchedule(NamedTuple):
    """A schedule: everything that rules, options and other hosts need to know about it.

    Attributes:
        placement: Assignment of slots to ranks.
        problems: Function of `pp`, `vpp`, `num_microbatches` that gives the reasons that it cannot run on them.
        orders: Function of the same arguments that gives the actions of every rank, in order.
        enough_microbatches: Function of the same arguments that gives a number of microbatches with all states that larger numbers have
            (`megaplan.schedules.states`).
        torch_name: Name in `torch.distributed.pipelining.schedules.get_schedule_class`; None if torch does not have it.
        least_vpp: Fewest slots per rank.
        splits_backward: True if it has actions I and W instead of some or all B.
        pairs: True if it has pairs of a forward and an unsplit backward (`megaplan.schedules.actions.Overlap`).
        accumulates: True if a spec may have it with one pipeline rank, on which it only accumulates gradients.
        spare_inputs: Function of `pp` that gives the receive buffers of a stage's inputs in addition to its microbatches in flight, for
            receives that torch posts early; None if every microbatch has a buffer.
        gradient_buffers: Function of `pp` that gives the receive buffers of a stage's gradients; None if every microbatch has one.
    """

    placement: Placement
    problems: Callable[[int, int, int], list[Problem]]
    orders: Callable[[int, int, int], Orders]
    torch_name: str | None
    enough_microbatches: Callable[[int, int, int], int] = lambda _pp, _vpp, num_microbatches: num_microbatches
    least_vpp: int = 1
    splits_backward: bool = False
    pairs: bool = False
    accumulates: bool = False
    spare_inputs: Callable[[int], int] | None = None
    gradient_buffers: Callable[[int], int] | None = None


def _none(_pp: int) -> int:
    return 0


def _one(_pp: int) -> int:
    return 1


def _all(pp: int) -> int:
    return pp


def _twice(pp: int) -> int:
    return 2 * pp


SCHEDULES = {
    "gpipe": RegisteredSchedule("single", gpipe.problems, gpipe.orders, "GPipe", gradient_buffers=_one),
    "1f1b": RegisteredSchedule(
        "single",
        one_f_one_b.problems,
        one_f_one_b.orders,
        "1F1B",
        one_f_one_b.enough_microbatches,
        accumulates=True,
        spare_inputs=_none,
        gradient_buffers=_one,
    ),
    "interleaved_1f1b": RegisteredSchedule(
        "loop",
        interleaved.problems,
        interleaved.orders,
        "Interleaved1F1B",
        interleaved.enough_microbatches,
        least_vpp=2,
        spare_inputs=_one,
        gradient_buffers=_twice,
    ),
    "paired_1f1b": RegisteredSchedule(
        "loop",
        paired_1f1b.problems,
        paired_1f1b.orders,
        None,
        paired_1f1b.enough_microbatches,
        pairs=True,
        spare_inputs=_one,
        gradient_buffers=_twice,
    ),
    "looped_bfs": RegisteredSchedule("loop", looped_bfs.problems, looped_bfs.orders, "LoopedBFS", least_vpp=2),
    "interleaved_zero_bubble": RegisteredSchedule(
        "loop",
        interleaved_zero_bubble.problems,
        interleaved_zero_bubble.orders,
        "InterleavedZeroBubble",
        interleaved_zero_bubble.enough_microbatches,
        splits_backward=True,
        spare_inputs=_all,
        gradient_buffers=_twice,
    ),
    "zbv": RegisteredSchedule(
        "v",
        zbv.problems,
        zbv.orders,
        "ZBVZeroBubble",
        zbv.enough_microbatches,
        least_vpp=2,
        splits_backward=True,
        spare_inputs=_one,
        gradient_buffers=_twice,
    ),
    "dualpipev": RegisteredSchedule(
        "v",
        dualpipev.problems,
        dualpipev.orders,
        "DualPipeV",
        dualpipev.enough_microbatches,
        least_vpp=2,
        splits_backward=True,
        pairs=True,
        spare_inputs=_one,
        gradient_buffers=_twice,
    ),
    "dualpipe": RegisteredSchedule(
        "mirror",
        dualpipe.problems,
        dualpipe.orders,
        None,
        dualpipe.enough_microbatches,
        splits_backward=True,
        pairs=True,
        spare_inputs=_one,
        gradient_buffers=_twice,
    ),
}
KINDS = tuple(SCHEDULES)
"""Names of all schedules, as in `schedule.kind`."""
SPLIT_BACKWARD = tuple(kind for kind, schedule in SCHEDULES.items() if schedule.splits_backward)
"""Schedules with actions I and W instead of some or all B."""
PAIRED = tuple(kind for kind, schedule in SCHEDULES.items() if schedule.pairs)
"""Schedules in which a forward and a backward overlap."""


def placement(kind: str) -> Placement:
    """Assignment of a schedule's slots to ranks.

    Raises:
        MegaplanError: MP310 for a kind that is not a schedule.
    """
    if kind not in SCHEDULES:
        raise MegaplanError([not_a_schedule(kind, SCHEDULES).diagnostic()])
    return SCHEDULES[kind].placement


def cut_pipeline(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[str, int, int, int]:
    """Kind, ranks, slots of a rank and microbatches of the pipeline whose slots are the parts of the model.

    It is the schedule's own, except for two mirrored copies, whose rank i and its mirror do the same as rank i of a V of half the ranks:
    cuts load the ranks of both equally, and a step of the V is at most as long, since its two middle slots exchange nothing.
    """
    return ("dualpipev", pp // 2, 2, num_microbatches // 2) if num_copies(placement(kind)) > 1 else (kind, pp, vpp, num_microbatches)


def schedule_problems(kind: str, pp: int, vpp: int, num_microbatches: int, *, planned: bool = False, few: bool = False) -> list[Problem]:
    """Reasons that the schedule cannot run on these degrees (MP310 … MP313); empty if it can.

    Args:
        kind: `schedule.kind` of a spec.
        pp: Pipeline degree.
        vpp: Slots per rank.
        num_microbatches: Microbatches of one schedule step.
        planned: True for a spec, in which one rank means no pipeline; false for a command about schedules only.
        few: True for a runtime that runs 1F1B with fewer microbatches than ranks; torch does not.
    """
    schedule = SCHEDULES.get(kind)
    if schedule is None:
        return [not_a_schedule(kind, SCHEDULES)]
    alone = [several_ranks(kind, pp)] if planned and pp < 2 and not schedule.accumulates else []
    found = schedule.problems(pp, vpp, num_microbatches)
    return [*alone, *(problem for problem in found if not (few and kind == "1f1b" and problem.code == "MP311"))]


def actions(kind: str, pp: int, vpp: int, num_microbatches: int) -> Orders:
    """Actions of every pp rank, in order; megarun compares torch's schedule object with it before the first step.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots per rank.
        num_microbatches: Microbatches of one optimizer step.

    Returns:
        For each pp rank its actions. Waits are not part of an order.

    Raises:
        MegaplanError: MP310 for a kind that is not a schedule; MP311 … MP313 if it cannot run on these degrees.
    """
    refuse_impossible(kind, pp, vpp, num_microbatches)
    return _orders(kind, pp, vpp, num_microbatches)


@lru_cache(maxsize=2)
def _orders(kind: str, pp: int, vpp: int, num_microbatches: int) -> Orders:
    """Orders, cached because replay and bounds both need them; only a few, because long orders take megabytes."""
    return SCHEDULES[kind].orders(pp, vpp, num_microbatches)


def runnable_microbatches(kind: str, pp: int, vpp: int, least: int) -> int:
    """The smallest number of microbatches, at least `least`, with which the schedule runs; `least` if there is none."""
    numbers = range(least, max(least, 2 * pp) + pp + 1)
    return next((number for number in numbers if not schedule_problems(kind, pp, vpp, number, few=True)), least)


@lru_cache(maxsize=1024)
def refuse_impossible(kind: str, pp: int, vpp: int, num_microbatches: int) -> None:
    """Raise if the schedule has no order on these degrees.

    Raises:
        MegaplanError: MP310 … MP313.
    """
    if found := schedule_problems(kind, pp, vpp, num_microbatches, few=True):
        raise MegaplanError([problem.diagnostic() for problem in found])
