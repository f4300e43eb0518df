"""Looped breadth-first: GPipe over `vpp` slots per rank; every chunk runs all microbatches before the next chunk begins.

Source: arXiv:2211.05953, figure 4c; `torch.distributed.pipelining.ScheduleLoopedBFS`, which drains each chunk's backwards from the last
microbatch to the first. Every rank holds m·v chunk activations.
"""

from megaplan.schedules.actions import Action, ActionKind, Orders
from megaplan.schedules.problems import Problem, several_chunks_a_rank


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:  # noqa: ARG001 (every schedule answers the same question)
    """Reasons that it cannot run on these degrees; empty if it can. With one chunk per rank it would be GPipe."""
    return [several_chunks_a_rank("looped_bfs", vpp)] if vpp < 2 else []


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The action order of every pp rank."""
    return tuple(_rank_order(range(rank, pp * vpp, pp), num_microbatches) for rank in range(pp))


def _rank_order(slots: range, num_microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(ActionKind.FORWARD, slot, index) for slot in slots for index in range(num_microbatches)]
    backwards = [Action(ActionKind.BACKWARD, slot, index) for slot in reversed(slots) for index in reversed(range(num_microbatches))]
    return (*forwards, *backwards)
