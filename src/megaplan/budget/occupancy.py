"""Which moments of a step's forward and backward a peak can lie at: counts of live microbatches and the state of every chunk.

`megaplan.schedule.in_flight` gives the largest counts; a budget also needs what else is alive with them: a chunk's parameters are gathered
from its first forward, its gradients exist from its first backward and are shards after its last. So each rank's order is walked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from megaplan.schedule.actions import Kind, computations
from megaplan.schedule.actions import Step as ScheduleStep
from megaplan.schedule.in_flight import non_dominated
from megaplan.schedule.registry import actions, refuse_impossible
from megaplan.tuples import new


class ChunkState(IntEnum):
    """What a chunk has behind it in this optimizer step."""

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


UNTOUCHED, FORWARDED, REFORWARDED, BACKWARDED, REDUCED = ChunkState
FORWARD, BACKWARD, REDUCE = Step
"""The members by name: looking one up on its class costs Python 3.11 more than the sums they decide."""


class Occupancy(NamedTuple):
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


@lru_cache(maxsize=64)
def moments(
    kind: str, pp: int, vpp: int, num_microbatches: int, chunk_of: tuple[int, ...], num_steps: int = 1
) -> tuple[tuple[Occupancy, ...], ...]:
    """The occupancies of every pp rank.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots a rank.
        num_microbatches: Of a schedule step.
        chunk_of: Chunk of every slot.
        num_steps: Schedule steps until gradients are reduced; a fourth one would have no moment that the others have not.

    Raises:
        MegaplanError: The schedule cannot run on these degrees.
    """
    refuse_impossible(kind, pp, vpp, num_microbatches)
    if kind == "1f1b":
        return tuple(one_f_one_b(pp - rank, num_microbatches, again=num_steps > 1) for rank in range(pp))
    enough = enough_microbatches(kind, pp, num_microbatches)
    return tuple(occupancies(order * num_steps, vpp, chunk_of, enough * num_steps) for order in actions(kind, pp, vpp, enough))


def one_f_one_b(in_flight: int, num_microbatches: int, *, again: bool = False) -> tuple[Occupancy, ...]:
    """What `occupancies` finds in a rank's 1F1B order, without walking it: warm-up, one forward and one backward in turn, cool-down.

    Args:
        in_flight: Microbatches alive in the steady state: pp − rank, not more than `num_microbatches`.
        num_microbatches: Of the step.
        again: Whether a second step follows before gradients are reduced: its warm-up finds them there, and layers gathered.
    """
    alone, goes_on, counts, fewer = in_flight == 1, num_microbatches > in_flight, (in_flight,), (in_flight - 1,)
    steady = new(Occupancy, (BACKWARD, 0, counts, (REFORWARDED,)))
    return (
        *((steady,) if goes_on else ()),
        *(() if alone else (new(Occupancy, (BACKWARD, 0, fewer, (BACKWARDED,))),)),
        *((steady,) if again and not goes_on else ()),
        new(Occupancy, (BACKWARD, 0, counts, (FORWARDED,))),
        new(Occupancy, (FORWARD, 0, (1,), (UNTOUCHED,))),
        *(() if alone else (new(Occupancy, (FORWARD, 0, counts, (FORWARDED,))),)),
        *((new(Occupancy, (FORWARD, 0, counts, (BACKWARDED,))),) if goes_on else ()),
        *((new(Occupancy, (FORWARD, 0, (1,), (BACKWARDED,))),) if again and not goes_on else ()),
        *((new(Occupancy, (FORWARD, 0, counts, (REFORWARDED,))),) if again and not alone else ()),
        new(Occupancy, (REDUCE, 0, (0,), (BACKWARDED,))),
    )


def enough_microbatches(kind: str, pp: int, num_microbatches: int) -> int:
    """Microbatches after which an order only repeats itself: fewer actions with the same occupancies.

    Interleaved 1F1B visits its chunks in rounds of pp microbatches if pp
    divides their number, and its warm-up takes less than two rounds.
    """
    if kind == "interleaved_1f1b" and num_microbatches % pp == 0:
        return min(num_microbatches, 4 * pp)
    return num_microbatches


def occupancies(order: tuple[ScheduleStep, ...], vpp: int, chunk_of: Sequence[int], num_microbatches: int) -> tuple[Occupancy, ...]:
    """The moments of one rank's order that no other moment dominates.

    Args:
        order: The rank's actions, of all schedule steps of an update.
        vpp: Chunks of the rank.
        chunk_of: Chunk of every slot.
        num_microbatches: Of the order: a chunk's gradients are reduced after that many backwards.

    Returns:
        Distinct moments. Of those with one step, chunk and states only the largest counts are given. Where a peak mostly is, in a backward
        that is not its chunk's first, comes first.
    """
    counts, states, left = [0] * vpp, [UNTOUCHED] * vpp, [num_microbatches] * vpp
    key = tuple(states)  # of `states`, made anew only when they change
    found: dict[tuple[Step, int, tuple[ChunkState, ...]], set[tuple[int, ...]]] = {}
    steps = tuple(computations(order))
    for position, action in enumerate(steps):
        chunk = chunk_of[action.slot]
        state = states[chunk]
        if action.kind is Kind.FORWARD:
            counts[chunk] += 1
            after = FORWARDED if state <= FORWARDED else REFORWARDED
            follows = steps[position + 1] if position + 1 < len(steps) else action
            if after is not state or follows.kind is not Kind.FORWARD or follows.slot != action.slot:
                found.setdefault((FORWARD, chunk, key), set()).add(tuple(counts))  # else the next one has larger counts
        elif action.kind is Kind.BACKWARD:
            found.setdefault((BACKWARD, chunk, key), set()).add(tuple(counts))
            counts[chunk] -= 1
            left[chunk] -= 1
            after = BACKWARDED
            if left[chunk] == 0:
                reducing = (*key[:chunk], after, *key[chunk + 1 :])
                found.setdefault((REDUCE, chunk, reducing), set()).add(tuple(counts))
                after = REDUCED
        else:
            raise ValueError(f"{action}: split backwards have a walk of their own")
        if after is not state:
            states[chunk] = after
            key = tuple(states)
    listed = [
        Occupancy(step, chunk, vector, chunk_states)
        for (step, chunk, chunk_states), vectors in found.items()
        for vector in (non_dominated(vectors) if len(vectors) > 1 else vectors)
    ]
    return tuple(sorted(listed, key=_likelihood))


def _likelihood(moment: Occupancy) -> int:
    if moment.step is BACKWARD:
        return int(moment.states[moment.chunk] is FORWARDED)
    return 2
