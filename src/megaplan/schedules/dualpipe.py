"""DualPipe: two copies of the model in opposite directions, so that rank i and rank p − 1 − i hold the same layers.

Half of the microbatches enters at rank 0 and runs through slots 0 to p − 1, the other half at rank p − 1 through slots p to 2p − 1. Rank i
and its mirror have the order of rank i of DualPipeV on p / 2 ranks with half of the microbatches. Chunk 0 of the V is the slot that
microbatches of the rank's own end reach first.

Source: arXiv:2412.19437, figure 5 and table 2 (github.com/deepseek-ai/DualPipe, steps 1 to 8). A rank holds at most p + 1 activations; with
equal slots its longest wait is (p / 2 − 1)(FB + B − 3W), FB the time of an overlapped pair.
"""

from megaplan.schedules import dualpipev
from megaplan.schedules.actions import Action, Orders, Overlap, ScheduleStep
from megaplan.schedules.problems import Problem, fewer_than_slots, odd_microbatches, odd_ranks, one_chunk_a_rank


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:
    """Reasons that it cannot run on these degrees; empty if it can."""
    found = [one_chunk_a_rank("dualpipe", vpp)] if vpp != 1 else []
    found += [odd_ranks("dualpipe", pp)] if pp % 2 else []
    few = num_microbatches < 2 * pp
    found += [fewer_than_slots(num_microbatches, pp, "1f1b")] if few else []
    return [*found, odd_microbatches(num_microbatches)] if num_microbatches % 2 and not few else found


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:  # noqa: ARG001 (a slot of either copy)
    """The action order of every pp rank."""
    half = num_microbatches // 2
    of_first_half = dualpipev.orders(pp // 2, 2, half)

    def placed(rank: int, action: Action) -> Action:
        """The action of a rank of the V on `rank`: a slot of either copy, with that copy's microbatches."""
        part = action.slot
        return Action(action.kind, part, action.microbatch) if part == rank else Action(action.kind, pp + part, half + action.microbatch)

    def step(rank: int, found: ScheduleStep) -> ScheduleStep:
        if isinstance(found, Overlap):
            return Overlap(placed(rank, found.forward), placed(rank, found.backward))
        return placed(rank, found)

    return tuple(tuple(step(rank, each) for each in of_first_half[min(rank, pp - 1 - rank)]) for rank in range(pp))


def enough_microbatches(pp: int, vpp: int, num_microbatches: int) -> int:  # noqa: ARG001 (a slot of either copy)
    """Number of microbatches after which an order only repeats: that of DualPipeV for each half."""
    return 2 * dualpipev.enough_microbatches(pp // 2, 2, num_microbatches // 2)
