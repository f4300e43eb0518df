"""1F1B: after a warm-up of one forward for each stage ahead, forwards and backwards alternate.

Source: PipeDream-Flush / Megatron-LM, arXiv:2104.04473 section 2.2.1; `torch.distributed.pipelining.Schedule1F1B`. Rank r holds at most
min(m, p − r) microbatches; every rank waits (p − 1)(F + B) when stages are equal.

torch 2.13's `Schedule1F1B.pipeline_order` numbers the forwards of the last rank one too high (F1, B0, …, Fm); what its step executes is
the order below.
"""

from megaplan.schedules.actions import Action, ActionKind, Orders
from megaplan.schedules.problems import Problem, few_microbatches, one_chunk_a_rank


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:
    """Reasons that torch's runtime would refuse these degrees; empty if it would not."""
    found = []
    if vpp != 1:
        found.append(one_chunk_a_rank("1f1b", vpp))
    if num_microbatches < pp:
        found.append(few_microbatches(num_microbatches, pp))
    return found


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The action order of every pp rank (`vpp` is 1)."""
    return tuple(_rank_order(rank, pp * vpp, num_microbatches) for rank in range(pp))


def enough_microbatches(pp: int, vpp: int, num_microbatches: int) -> int:  # noqa: ARG001 (every schedule answers the same question)
    """Number of microbatches after which an order only repeats: a warm-up has fewer than pp, and each rank then runs one forward more."""
    return min(num_microbatches, pp + 1)


def _rank_order(rank: int, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    warmup = min(pp - 1 - rank, num_microbatches)
    order = [Action(ActionKind.FORWARD, rank, microbatch) for microbatch in range(warmup)]
    for backward, forward in enumerate(range(warmup, num_microbatches)):
        order.append(Action(ActionKind.FORWARD, rank, forward))
        order.append(Action(ActionKind.BACKWARD, rank, backward))
    order += [Action(ActionKind.BACKWARD, rank, microbatch) for microbatch in range(num_microbatches - warmup, num_microbatches)]
    return tuple(order)
