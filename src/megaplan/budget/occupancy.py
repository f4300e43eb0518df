"""Which moments of a step's forward and backward a peak can lie at: counts of live microbatches and the state of every chunk.

`megaplan.schedule.in_flight` gives the largest counts; a budget also needs what else is alive with them: a chunk's parameters are gathered
from its first forward, its gradients exist from its first backward and are shards after its last. So each rank's order is walked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megaplan.schedule.actions import Kind, computations
from megaplan.schedule.actions import Step as ScheduleStep
from megaplan.schedule.in_flight import non_dominated


class ChunkState(IntEnum):
    """What a chunk has behind it in this step."""

    UNTOUCHED = 0
    FORWARDED = 1  # no backward yet
    REFORWARDED = 2  # a backward, then a forward
    BACKWARDED = 3  # a backward last
    REDUCED = 4  # its last backward, and its gradients are shards


class Step(IntEnum):
    """What happens at a moment."""

    FORWARD = 0
    BACKWARD = 1
    REDUCE = 2


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A rank while `step` runs on `chunk`.

    Attributes:
        step: Forward, backward, or the reduction after a chunk's last backward.
        chunk: The chunk it runs on.
        counts: Live microbatches of each chunk, the running one included (none for a reduction).
        states: Of each chunk, before the step.
    """

    step: Step
    chunk: int
    counts: tuple[int, ...]
    states: tuple[ChunkState, ...]


def enough_microbatches(kind: str, pp: int, num_microbatches: int) -> int:
    """Microbatches after which an order only repeats itself: fewer actions with the same occupancies.

    1F1B is steady after its warm-up of at most pp − 1 forwards. Interleaved 1F1B visits its chunks in rounds of pp microbatches if pp
    divides their number, and its warm-up takes less than two rounds.
    """
    if kind == "1f1b":
        return min(num_microbatches, pp + 2)
    if kind == "interleaved_1f1b" and num_microbatches % pp == 0:
        return min(num_microbatches, 4 * pp)
    return num_microbatches


def occupancies(order: tuple[ScheduleStep, ...], vpp: int, chunk_of: Sequence[int], num_microbatches: int) -> tuple[Occupancy, ...]:
    """The moments of one rank's order that no other moment dominates.

    Args:
        order: The rank's actions.
        vpp: Chunks of the rank.
        chunk_of: Chunk of every slot.
        num_microbatches: Of the step: a chunk's gradients are reduced after that many backwards.

    Returns:
        Distinct moments. Of those with one step, chunk and states only the largest counts are given.
    """
    counts, states, left = [0] * vpp, [ChunkState.UNTOUCHED] * vpp, [num_microbatches] * vpp
    key = tuple(states)  # of `states`, made anew only when they change
    found: dict[tuple[Step, int, tuple[ChunkState, ...]], set[tuple[int, ...]]] = {}
    steps = tuple(computations(order))
    for position, action in enumerate(steps):
        chunk = chunk_of[action.slot]
        state = states[chunk]
        if action.kind is Kind.FORWARD:
            counts[chunk] += 1
            after = ChunkState.FORWARDED if state <= ChunkState.FORWARDED else ChunkState.REFORWARDED
            follows = steps[position + 1] if position + 1 < len(steps) else action
            if after is not state or follows.kind is not Kind.FORWARD or follows.slot != action.slot:
                found.setdefault((Step.FORWARD, chunk, key), set()).add(tuple(counts))  # else the next one has larger counts
        elif action.kind is Kind.INPUT:  # what W needs stays; here all of it is counted until W has ended
            found.setdefault((Step.BACKWARD, chunk, key), set()).add(tuple(counts))
            after = ChunkState.BACKWARDED
        else:
            if action.kind is Kind.BACKWARD:
                found.setdefault((Step.BACKWARD, chunk, key), set()).add(tuple(counts))
            counts[chunk] -= 1
            left[chunk] -= 1
            after = ChunkState.BACKWARDED
            if left[chunk] == 0:
                reducing = (*key[:chunk], after, *key[chunk + 1 :])
                found.setdefault((Step.REDUCE, chunk, reducing), set()).add(tuple(counts))
                after = ChunkState.REDUCED
        if after is not state:
            states[chunk] = after
            key = tuple(states)
    return tuple(
        Occupancy(step, chunk, vector, chunk_states)
        for (step, chunk, chunk_states), vectors in found.items()
        for vector in (non_dominated(vectors) if len(vectors) > 1 else vectors)
    )
