"""GPipe: all forwards, then all backwards.

Source: arXiv:1811.06965, figure 2c; `torch.distributed.pipelining.ScheduleGPipe`. Every rank holds all m microbatches; with equal stages
each waits (p − 1)(F + B).
"""

from megaplan.schedules.actions import Action, ActionKind, Orders
from megaplan.schedules.problems import Problem, one_chunk_a_rank


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:  # noqa: ARG001 (every schedule answers the same question)
    """Reasons that it cannot run on these degrees; empty if it can."""
    return [one_chunk_a_rank("gpipe", vpp)] if vpp != 1 else []


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The action order of every pp rank (`vpp` is 1)."""
    phases = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return tuple(tuple(Action(kind, slot, index) for kind in phases for index in range(num_microbatches)) for slot in range(pp * vpp))
