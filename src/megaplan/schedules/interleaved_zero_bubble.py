"""Interleaved zero bubble (ZB-H1 with one slot per rank): interleaved 1F1B whose weight gradients fill the idle time.

A backward sends only its input gradient (I); rank r runs the weight gradient (W) of a microbatch r steps after its I. Therefore a hop away
from the last rank costs one more forward in the warm-up, not two, and every rank ends with the deferred weight gradients.

Source: arXiv:2401.10241, figure 3 (ZB-H1); `torch.distributed.pipelining.ScheduleInterleavedZeroBubble`, whose rounds are interleaved
1F1B's. Until W every rank holds at most min(m·v, (v − 1)·g + p) chunk activations; for m ≥ p each waits (p − 1)(F + I − W).
"""

from megaplan.schedules import interleaved
from megaplan.schedules.actions import Action, ActionKind, Orders
from megaplan.schedules.interleaved import num_rounds, round_problems, visits
from megaplan.schedules.problems import Problem


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:  # noqa: ARG001 (any number of chunks: one is ZB-H1)
    """Reasons that torch's runtime would refuse these degrees; empty if it would not."""
    return round_problems(pp, num_microbatches)


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The action order of every pp rank."""
    group = num_microbatches // num_rounds(pp, num_microbatches)
    forwards = visits(range(vpp), group, num_microbatches)
    backwards = visits(range(vpp - 1, -1, -1), group, num_microbatches)
    return tuple(_rank_order(rank, pp, (vpp - 1) * group, forwards, backwards) for rank in range(pp))


def enough_microbatches(pp: int, vpp: int, num_microbatches: int) -> int:
    """Number of microbatches after which an order only repeats."""
    return interleaved.enough_microbatches(pp, vpp, num_microbatches)


def _rank_order(
    rank: int, pp: int, last_warmup: int, forwards: list[tuple[int, int]], backwards: list[tuple[int, int]]
) -> tuple[Action, ...]:
    def made(kind: ActionKind, visit: tuple[int, int]) -> Action:
        return Action(kind, visit[0] * pp + rank, visit[1])

    warmup = min(last_warmup + pp - 1 - rank, len(forwards))
    order = [made(ActionKind.FORWARD, visit) for visit in forwards[:warmup]]
    ahead = iter(forwards[warmup:])
    for index, visit in enumerate(backwards):
        forward = next(ahead, None)
        if forward is not None:
            order.append(made(ActionKind.FORWARD, forward))
        order.append(made(ActionKind.INPUT, visit))
        if index >= rank:
            order.append(made(ActionKind.WEIGHT, backwards[index - rank]))
    order += [made(ActionKind.WEIGHT, visit) for visit in backwards[max(0, len(backwards) - rank) :]]
    return tuple(order)
