"""1F1B whose steady state is pairs, with one or several slots per rank. One more forward in the warm-up makes both parts independent.

For every hop to the last rank there are two more forwards in the warm-up, also with one slot: neighbours that run pairs need twice
the distance of 1F1B. Rank r holds at most min(m·v, 2(p − 1 − r) + (v − 1)·g + 2) chunk activations, one more than interleaved 1F1B; with
equal chunks, m ≥ p and pairs in sequence every rank waits (p − 1)(F + B) of a chunk, as under 1F1B.

Source: Megatron-Core's `--overlap-moe-expert-parallel-comm`, whose warm-up has one more microbatch
(`megatron/core/pipeline_parallel/schedules.py`, `get_pp_rank_microbatches`).
"""

from megaplan.schedules import interleaved
from megaplan.schedules.actions import Orders
from megaplan.schedules.problems import Problem


def problems(pp: int, vpp: int, num_microbatches: int) -> list[Problem]:
    """Reasons that it cannot run on these degrees; empty if it can. One slot per rank has no rounds."""
    return interleaved.round_problems(pp, num_microbatches) if vpp > 1 else []


def orders(pp: int, vpp: int, num_microbatches: int) -> Orders:
    """The action order of every pp rank."""
    return interleaved.rank_orders(pp, vpp, num_microbatches, pairs=True)


def enough_microbatches(pp: int, vpp: int, num_microbatches: int) -> int:
    """Number of microbatches after which an order only repeats: with one slot per rank, of the longest warm-up and two pairs."""
    return interleaved.enough_microbatches(pp, vpp, num_microbatches) if vpp > 1 else min(num_microbatches, 2 * pp + 1)
