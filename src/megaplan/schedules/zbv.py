"""ZB-V: two chunks per rank in a V with a split backward, so that no rank idles inside its own span when F = I = W.

Source: arXiv:2401.10241, figure 6 (ZB-V); `torch.distributed.pipelining.ScheduleZBVZeroBubble`. Every rank holds at most 2p chunk
activations (m ≥ 2p); the stagger (p − 1)F remains in a step that ends with a synchronisation.

With fewer than 2p − 1 microbatches the order is that for 2p − 1 without the missing ones.
"""

from megaplan.schedules.actions import Orders, ScheduleStep
from megaplan.schedules.lane import OrderWriter
from megaplan.schedules.problems import Problem, two_chunks_a_rank


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:  # noqa: ARG001 (every schedule answers the same question)
    """Reasons that it cannot run on these degrees; empty if it can."""
    return [two_chunks_a_rank("zbv", pp, vpp)] if vpp != 2 else []


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:  # noqa: ARG001 (two chunks)
    """The action order of every pp rank."""
    return tuple(_rank_order(rank, pp, num_microbatches) for rank in range(pp))


def enough_microbatches(pp: int, vpp: int, num_microbatches: int) -> int:  # noqa: ARG001 (two chunks)
    """Number of microbatches after which an order only repeats: one more than are in flight on a rank."""
    return min(num_microbatches, 2 * pp + 1)


def _rank_order(rank: int, pp: int, num_microbatches: int) -> tuple[ScheduleStep, ...]:
    """The order of a rank. Each loop ends once everything that it could write is of missing microbatches."""
    lane = OrderWriter(rank, pp, num_microbatches)
    for _ in range(min(2 * (pp - rank) - 1, num_microbatches)):  # down the first leg of the V, until the second leg's input arrives
        lane.forward(0)
    for _ in range(min(rank, num_microbatches)):
        lane.forward(1)
        lane.forward(0)
    for _ in range(min(pp - rank, num_microbatches)):
        lane.forward(1)
        lane.input(1)
        lane.weight()
    for _ in range(min(max(pp - 1, num_microbatches - pp), num_microbatches)):
        lane.forward(0)
        lane.input(0)
        lane.weight()
        lane.forward(1)
        lane.input(1)
        lane.weight()
    for _ in range(min(rank, num_microbatches)):  # the drain: weight gradients are deferred, so that input gradients are sent at once
        lane.input(0)
        lane.input(1)
    for _ in range(min(pp - rank, num_microbatches)):
        lane.input(0)
        lane.weight(0)
    lane.pay(1, 0)
    return tuple(lane.order)
