"""Interleaved 1F1B: every rank owns `vpp` slots and visits them in rounds of g microbatches, depth first.

Source: arXiv:2104.04473 section 2.2.2; `torch.distributed.pipelining.ScheduleInterleaved1F1B`, whose group size this follows:
rounds = max(1, m div p), and g = m / rounds microbatches of one chunk before the next chunk. Rank r holds at most
min(m·v, 2(p − 1 − r) + (v − 1)·g + 1) chunk activations; with equal chunks and m ≥ p every rank waits (p − 1)(F + B) of a chunk.
"""

from megaplan.schedules.actions import Action, ActionKind, Orders, Overlap, ScheduleStep
from megaplan.schedules.problems import Problem, several_chunks_a_rank, uneven_rounds


def num_rounds(pp: int, num_microbatches: int) -> int:
    """Number of times that a rank visits all its chunks."""
    return max(1, num_microbatches // pp)


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:
    """Reasons that it cannot run on these degrees; empty if it can."""
    chunks = [several_chunks_a_rank("interleaved_1f1b", vpp)] if vpp < 2 else []
    return [*chunks, *round_problems(pp, num_microbatches)]


def round_problems(pp: int, num_microbatches: int) -> list[Problem]:
    """Reasons that torch's runtime would refuse to run the microbatches in rounds; empty if it would not."""
    rounds = num_rounds(pp, num_microbatches)
    return [uneven_rounds(num_microbatches, pp, rounds)] if num_microbatches % rounds else []


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The action order of every pp rank."""
    return rank_orders(pp, vpp, num_microbatches)


def rank_orders(pp: int, vpp: int, num_microbatches: int, *, pairs: bool = False) -> Orders:
    """The action order of every pp rank.

    Args:
        pp: Pipeline degree.
        vpp: Slots per rank.
        num_microbatches: Microbatches of one schedule step.
        pairs: True to run a forward and the following backward as a pair. The warm-up then has one forward more, so that neither part of a
            pair waits for the other.
    """
    group = num_microbatches // num_rounds(pp, num_microbatches) if vpp > 1 else num_microbatches
    forwards = visits(range(vpp), group, num_microbatches)
    backwards = visits(range(vpp - 1, -1, -1), group, num_microbatches)
    return tuple(_rank_order(rank, pp, (vpp - 1) * group, forwards, backwards, pairs=pairs) for rank in range(pp))


def visits(chunks: range, group: int, num_microbatches: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order of visits: each round runs its `group` microbatches through all chunks."""
    rounds = range(0, num_microbatches, group)
    return [(chunk, start + offset) for start in rounds for chunk in chunks for offset in range(group)]


def enough_microbatches(pp: int, vpp: int, num_microbatches: int) -> int:  # noqa: ARG001 (every schedule answers the same question)
    """Number of microbatches after which an order only repeats: the warm-up takes fewer than two rounds of pp microbatches."""
    return num_microbatches if num_microbatches % pp else min(num_microbatches, 3 * pp)


def _rank_order(
    rank: int, pp: int, last_warmup: int, forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], *, pairs: bool
) -> tuple[ScheduleStep, ...]:
    # Two more forwards for every hop away from the last rank: one for the forward to arrive there, one for its backward to return.
    warmup = min(last_warmup + 2 * (pp - 1 - rank) + pairs, len(forwards))
    ahead = [Action(ActionKind.FORWARD, chunk * pp + rank, microbatch) for chunk, microbatch in forwards]
    back = [Action(ActionKind.BACKWARD, chunk * pp + rank, microbatch) for chunk, microbatch in backwards]
    order: list[ScheduleStep] = [*ahead[:warmup]]
    for forward, backward in zip(ahead[warmup:], back, strict=False):
        order += [Overlap(forward, backward)] if pairs else [forward, backward]
    return (*order, *back[len(ahead) - warmup :])
