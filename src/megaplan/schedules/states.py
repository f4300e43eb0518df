"""States of a rank at which its memory can peak: the running action, the microbatches in flight, and each chunk's progress.

One pass over a rank's action order gives them for every schedule, with or without split backwards. A budget multiplies their counts with
bytes, and reads the other allocated tensors from the chunk states: a chunk's parameters are gathered from its first forward, its gradients
exist from its first backward and are shards after their reduction.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from megaplan.schedules.actions import Action, ActionKind, Overlap, ScheduleStep
from megaplan.schedules.placement import num_copies, slot_owner, slots_of_rank
from megaplan.schedules.registry import SCHEDULES, actions, placement, refuse_impossible
from megaplan.tuples import new

Vector = tuple[int, ...]


class ChunkState(IntEnum):
    """Progress of a chunk in this optimizer step."""

    UNTOUCHED = 0
    FORWARDED = 1  # forwards only
    FORWARD_AFTER_BACKWARD = 2  # a backward, and a forward after it
    BACKWARDED = 3  # a backward last
    REDUCED = 4  # its last backward has run; its gradients are shards


FORWARD, BACKWARD, INPUT, WEIGHT, REDUCE = ActionKind
UNTOUCHED, FORWARDED, FORWARD_AFTER_BACKWARD, BACKWARDED, REDUCED = ChunkState
"""The members by name: a lookup on the class costs Python 3.11 more than the sums that they decide."""


class RankState(NamedTuple):
    """State of a rank while it runs one action.

    Attributes:
        kind: Kind of the action: a forward, a backward or one half of it, or the reduction of a chunk's gradients.
        chunk: Chunk of the action.
        in_flight: Microbatches of each chunk whose forward has begun and whose backward (its input half, if it is split) has not ended.
        waiting: Microbatches of each chunk whose input half has ended and whose weight half has not.
        passed_gradients: Gradients that the later of two neighbouring stages on this rank has made and the earlier has not consumed.
        kept_inputs: Microbatches whose W of that later stage has not run although the earlier stage's backward has ended, so that its input
            from the earlier stage is kept only for W; without the microbatch whose W runs.
        owns_input: True if the running W belongs to such a microbatch.
        states: State of each chunk before the action; an input half counts as a backward.
        weight_grads: True for each chunk whose weight half or unsplit backward has ended once, so that all its gradients exist.
        partner: Chunk of the backward that alternates with this forward; −1 if the action runs alone.
    """

    kind: ActionKind
    chunk: int
    in_flight: Vector
    waiting: Vector
    passed_gradients: int
    kept_inputs: int
    owns_input: bool
    states: tuple[ChunkState, ...]
    weight_grads: tuple[bool, ...]
    partner: int = -1


def rank_states(
    kind: str, pp: int, vpp: int, num_microbatches: int, num_steps: int = 1, *, interleaved: bool = False
) -> tuple[tuple[RankState, ...], ...]:
    """The states of every pp rank at which memory can peak.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots of a rank, of each copy of the model.
        num_microbatches: Microbatches of a schedule step.
        num_steps: Schedule steps until gradients are reduced; a fourth one adds no further state.
        interleaved: True if the parts of a pair take turns, instead of running one after the other.

    Raises:
        MegaplanError: MP310 for a kind that is not a schedule; MP311 … MP313 if it cannot run on these degrees.
    """
    refuse_impossible(kind, pp, vpp, num_microbatches)
    return _moments(kind, pp, vpp, SCHEDULES[kind].enough_microbatches(pp, vpp, num_microbatches), num_steps, interleaved)


@lru_cache(maxsize=512)
def _moments(kind: str, pp: int, vpp: int, num_microbatches: int, num_steps: int, interleaved: bool) -> tuple[tuple[RankState, ...], ...]:
    where, found = placement(kind), []
    copies = num_copies(where)
    chunk_of = [slot_owner(where, slot, pp)[1] for slot in range(pp * vpp * copies)]
    for rank, order in enumerate(actions(kind, pp, vpp, num_microbatches)):
        slots = slots_of_rank(where, rank, pp, vpp)
        neighbours = len(slots) == 2 and slots[1] == slots[0] + 1 and copies == 1
        count = num_microbatches // copies * num_steps
        found.append(states_of(order * num_steps, chunk_of, len(slots), count, neighbours=neighbours, interleaved=interleaved))
    return tuple(found)


def states_of(
    order: tuple[ScheduleStep, ...],
    chunk_of: Sequence[int],
    vpp: int,
    num_microbatches: int,
    *,
    neighbours: bool = False,
    interleaved: bool = False,
) -> tuple[RankState, ...]:
    """The states of one rank's order that no other state dominates.

    Args:
        order: Actions of the rank, for all schedule steps of an update.
        chunk_of: Chunk of every slot.
        vpp: Chunks of the rank.
        num_microbatches: Microbatches of a chunk, whose gradients are reduced after this many backwards.
        neighbours: True if the rank's two chunks are neighbours in the model, as on the last rank of a V.
        interleaved: True if the parts of a pair take turns: both are one state, before either runs.

    Returns:
        Distinct states. Of states that differ only in counts, only the largest counts are given. The usual place of a peak, a backward
        that is not its chunk's first, comes first.
    """
    in_flight, waiting, passed_gradients = [0] * vpp, [0] * vpp, 0
    ended, late = set[int](), set[int]()  # microbatches after the backward of the earlier neighbour and before the W of the later one
    states, weight_grads, left = [UNTOUCHED] * vpp, [False] * vpp, [num_microbatches] * vpp
    found: dict[tuple[ActionKind, int, tuple[ChunkState, ...], tuple[bool, ...], int], dict[Vector, None]] = {}

    def add(kind: ActionKind, chunk: int, microbatch: int = -1, partner: int = -1) -> None:
        counts = found.setdefault((kind, chunk, tuple(states), tuple(weight_grads), partner), {})
        owned = late & ended
        owns = kind is WEIGHT and chunk == 1 and microbatch in owned
        counts[*in_flight, *waiting, passed_gradients, len(owned) - owns, owns] = None

    for action, partner in _with_partners(order, chunk_of, interleaved=interleaved):
        chunk, kind = chunk_of[action.slot], action.kind
        if kind is FORWARD:
            in_flight[chunk] += 1
            if chunk == 0:
                ended.discard(action.microbatch)
            add(kind, chunk, partner=partner)
            states[chunk] = FORWARDED if states[chunk] <= FORWARDED else FORWARD_AFTER_BACKWARD
            continue
        if partner < 0:  # otherwise it is still in the state of its forward
            add(kind, chunk, action.microbatch)
        if kind is WEIGHT:
            waiting[chunk] -= 1
            if chunk == 1:
                late.discard(action.microbatch)
        else:
            if neighbours and chunk == 0:
                ended.add(action.microbatch)
            if chunk == 1 and kind is INPUT:
                late.add(action.microbatch)
            in_flight[chunk] -= 1
            waiting[chunk] += kind is INPUT
            passed_gradients += neighbours and (1 if chunk else -1)
            states[chunk] = BACKWARDED
        if kind is not INPUT:
            weight_grads[chunk] = True
            left[chunk] -= 1
            if left[chunk] == 0:
                add(REDUCE, chunk)
                states[chunk] = REDUCED
    listed = [
        new(RankState, (kind, chunk, counts[:vpp], counts[vpp:-3], counts[-3], counts[-2], bool(counts[-1]), chunk_states, grads, partner))
        for (kind, chunk, chunk_states, grads, partner), vectors in found.items()
        for counts in (non_dominated(vectors) if len(vectors) > 1 else vectors)
    ]
    return tuple(sorted(listed, key=_likelihood))


def _with_partners(order: tuple[ScheduleStep, ...], chunk_of: Sequence[int], *, interleaved: bool) -> Iterator[tuple[Action, int]]:
    """Every computation of an order, with the chunk of the computation with which it alternates, or −1."""
    for step in order:
        if interleaved and isinstance(step, Overlap):
            yield step.forward, chunk_of[step.backward.slot]
            yield step.backward, chunk_of[step.forward.slot]
        else:
            yield from ((action, -1) for action in step.parts)


def sequential_states(num_microbatches: int) -> tuple[RankState, ...]:
    """The states of a rank without a pipeline: forwards and backwards alternate, and layers reduce their gradients as they end.

    The last microbatch's states are the largest, because the earlier gradients exist.
    """
    before = (FORWARD_AFTER_BACKWARD, BACKWARDED) if num_microbatches > 1 else (FORWARDED, UNTOUCHED)
    return tuple(
        RankState(kind, 0, (1,), (0,), 0, 0, False, (state,), (num_microbatches > 1,))
        for kind, state in zip((BACKWARD, FORWARD), before, strict=True)
    )


def non_dominated(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    """The vectors that no other vector dominates in every component, in lexicographic order."""
    kept: list[Vector] = []
    for vector in sorted(set(vectors), reverse=True):  # the vectors that dominate a vector come before it
        if not any(all(map(ge, other, vector)) for other in kept):
            kept.append(vector)
    return tuple(reversed(kept))


def _likelihood(point: RankState) -> int:
    if point.kind in (FORWARD, REDUCE):
        return 2
    return int(point.states[point.chunk] is FORWARDED)
