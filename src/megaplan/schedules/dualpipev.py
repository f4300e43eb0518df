"""DualPipeV: DualPipe folded into a V. In the steady state a forward of one chunk and a backward of the other run together.

Source: arXiv:2412.19437, figure 5, and its cut-in-half form (github.com/deepseek-ai/DualPipe, steps 1 to 8);
`torch.distributed.pipelining.ScheduleDualPipeV`. Rank r holds at most 2p − r activations of its first chunk and r + 1 of its second
(m ≥ 2p); with equal chunks the longest wait is (p − 1)(FB + B − 3W), FB the time of an overlapped pair.
"""

from megaplan.schedules.actions import Orders, ScheduleStep
from megaplan.schedules.lane import OrderWriter
from megaplan.schedules.problems import Problem, fewer_than_slots, two_chunks_a_rank


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:
    """Reasons that it cannot run on these degrees; empty if it can."""
    found = [two_chunks_a_rank("dualpipev", pp, vpp)] if vpp != 2 else []
    return [*found, fewer_than_slots(num_microbatches, pp)] if num_microbatches < 2 * pp else found


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:  # noqa: ARG001 (two chunks)
    """The action order of every pp rank."""
    return tuple(_rank_order(rank, pp, num_microbatches) for rank in range(pp))


def enough_microbatches(pp: int, vpp: int, num_microbatches: int) -> int:  # noqa: ARG001 (two chunks)
    """Number of microbatches after which an order only repeats: one more than are in flight on a rank."""
    return min(num_microbatches, 2 * pp + 1)


def _rank_order(rank: int, pp: int, num_microbatches: int) -> tuple[ScheduleStep, ...]:
    lane, behind = OrderWriter(rank, pp, num_microbatches), pp - 1 - rank
    for _ in range(2 * behind):
        lane.forward(0)
    for _ in range(rank + 1):
        lane.forward(0)
        lane.forward(1)
    for _ in range(behind):
        lane.input(1)
        lane.weight()
        lane.forward(1)
    for index in range(num_microbatches - 2 * pp + rank + 1):
        if index == 0 and behind == 0:  # the turning stage of the V: its own forward must not wait for a concurrent backward
            lane.forward(0)
            lane.backward(1)
        else:
            lane.overlap(0, 1)
        lane.overlap(1, 0)
    for _ in range(behind):
        lane.backward(1)
        lane.overlap(1, 0)
    for index in range(2 * (rank + 1)):  # the weight gradients of the second half are deferred
        (lane.backward if index < rank + 1 else lane.input)(1 - index % 2)
    for _ in range(behind):
        lane.weight()
        lane.input(0)
    for _ in range(rank + 1):
        lane.weight()
    return tuple(lane.order)
