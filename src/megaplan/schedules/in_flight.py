"""Numbers of microbatches in flight at the same time, by chunk: the integers that multiply the saved-activation ledger.

A microbatch is in flight on a chunk from the start of its forward to the end of its backward. If the backward is split, the end of I frees
the tensors that only the input gradient needs; tensors that W needs stay until the end of W: full, then pending. Chunks do not peak at the
same time, so a rank's peak is the largest dot product of one of these vectors with the bytes of its chunks, which may be less than the sum
of the chunks' maxima. An overlapped forward begins before its backward has freed anything.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megaplan.schedules.placement import num_copies, slot_owner, slots_of_rank
from megaplan.schedules.registry import SCHEDULES, placement
from megaplan.schedules.states import RankState, Vector, non_dominated, rank_states


class InFlight(NamedTuple):
    """Microbatches in flight at one point of a rank's order, for each of its chunks.

    Attributes:
        full: Microbatches whose forward has begun and whose I (or unsplit backward) has not ended.
        pending_weight: Microbatches whose I has ended and whose W has not.
    """

    full: Vector
    pending_weight: Vector

    def total_bytes(self, full_bytes: Sequence[int], pending_bytes: Sequence[int]) -> int:
        """Bytes that these microbatches keep.

        Args:
            full_bytes: Bytes that one microbatch keeps on each chunk until I has ended.
            pending_bytes: Bytes that it keeps from then until W has ended.
        """
        full = sum([count * size for count, size in zip(self.full, full_bytes, strict=True)])
        return full + sum([count * size for count, size in zip(self.pending_weight, pending_bytes, strict=True)])


def in_flight(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[InFlight, ...], ...]:
    """The non-dominated vectors of microbatches in flight at the same time.

    They depend only on each rank's own order, not on the actions' durations.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots per rank.
        num_microbatches: Microbatches of one optimizer step.

    Returns:
        For each pp rank its vectors, in lexicographic order. No vector is at most another one in every count.

    Raises:
        MegaplanError: The schedule cannot run on these degrees.
    """
    return tuple(vectors_of(found) for found in rank_states(kind, pp, vpp, num_microbatches))


def vectors_of(found: Iterable[RankState]) -> tuple[InFlight, ...]:
    """The non-dominated vectors of one rank's states."""
    maximal = non_dominated((*point.in_flight, *point.waiting) for point in found)
    return tuple(InFlight(vector[: len(vector) // 2], vector[len(vector) // 2 :]) for vector in maximal)


def peak_bytes(vectors: Iterable[InFlight], full_bytes: Sequence[int], pending_bytes: Sequence[int]) -> int:
    """Most bytes that a rank's microbatches keep at the same time: the largest dot product, see `InFlight.total_bytes`."""
    return max(vector.total_bytes(full_bytes, pending_bytes) for vector in vectors)


@lru_cache(maxsize=512)
def receive_buffers(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Receive buffers of each rank if every microbatch has its own for the whole run.

    Source: `torch.distributed.pipelining.stage`, whose receive infos are made for all microbatches at the first step.

    Returns:
        For each pp rank and chunk: (activations from the slot before, gradients from the slot after), in boundaries. The first slot
        receives no activation, the last no gradient, and the middle slots of a V nothing from each other: they are on one rank. The last
        slot of one copy of the model and the first of the other are not neighbours either.

    Raises:
        MegaplanError: MP310 for a kind that is not a schedule.
    """
    where, copies = placement(kind), num_copies(placement(kind))
    owners = [slot_owner(where, slot, pp)[0] for slot in range(pp * vpp * copies)]
    each = num_microbatches // copies
    between = [each if owner != after else 0 for owner, after in pairwise(owners)]  # exchanges of neighbouring slots
    before, after = [0, *between], [*between, 0]
    owned = [slots_of_rank(where, rank, pp, vpp) for rank in range(pp)]
    return tuple([tuple([(before[slot], after[slot]) for slot in slots]) for slots in owned])


@lru_cache(maxsize=512)
def shared_buffers(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Receive buffers of each rank if microbatch m has buffer m modulo their number: the numbers that megarun allocates.

    A buffer is taken from the receive, which torch may post before other computations, to the end of the microbatch's backward, W
    included. The numbers are enough for the orders in which torch 2.11 and 2.13 receive; `megarun.parallel.apply.order` checks them.

    Returns:
        As `receive_buffers`.

    Raises:
        MegaplanError: The schedule cannot run on these degrees.
    """
    own = receive_buffers(kind, pp, vpp, num_microbatches)
    spare, gradients = SCHEDULES[kind].spare_inputs, SCHEDULES[kind].gradient_buffers
    most = num_microbatches if gradients is None else gradients(pp)
    if spare is None:
        return tuple([tuple([(inputs, min(sent, most)) for inputs, sent in chunks]) for chunks in own])
    found = []
    for chunks, states in zip(own, rank_states(kind, pp, vpp, num_microbatches), strict=True):
        held = [max(state.in_flight[chunk] + state.waiting[chunk] for state in states) for chunk in range(len(chunks))]
        counts = zip(chunks, held, strict=True)
        found.append(tuple([(min(inputs, number + spare(pp)), min(sent, most)) for (inputs, sent), number in counts]))
    return tuple(found)
