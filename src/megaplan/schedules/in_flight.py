"""How many microbatches are alive at once, chunk by chunk: the integers that multiply the saved-activation ledger.

A microbatch is in flight on a chunk from the start of its forward to the end of its backward. Where the backward is split, the end of I
frees what only the input gradient needed, and what W still needs stays until the end of W: full, then pending. Chunks do not peak
together, so a rank's peak is the largest dot product of a vector below with the bytes of its chunks, never the sum of each chunk's own
maximum. An overlapped forward begins before its backward has freed anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megaplan.schedules.moments import RankState, Vector, moments, non_dominated
from megaplan.schedules.placement import slot_owner, slots_of_rank
from megaplan.schedules.registry import placement


class InFlight(NamedTuple):
    """Microbatches alive at one moment of a rank, for each of its chunks.

    Attributes:
        full: Forward begun, I (or the whole backward) not ended.
        pending_weight: I ended, W not.
    """

    full: Vector
    pending_weight: Vector

    def total_bytes(self, full_bytes: Sequence[int], pending_bytes: Sequence[int]) -> int:
        """Bytes that these microbatches keep.

        Args:
            full_bytes: What one microbatch keeps on each chunk until I has ended.
            pending_bytes: What it keeps from then until W has ended.
        """
        full = sum([count * size for count, size in zip(self.full, full_bytes, strict=True)])
        return full + sum([count * size for count, size in zip(self.pending_weight, pending_bytes, strict=True)])


def in_flight(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[InFlight, ...], ...]:
    """The non-dominated vectors of simultaneously live microbatches.

    They follow from each rank's own order alone, whatever the actions' durations.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots a rank.
        num_microbatches: Microbatches of one optimizer step.

    Returns:
        For each pp rank its vectors, in lexicographic order. No vector is at most another one in every count.

    Raises:
        MegaplanError: The schedule cannot run on these degrees.
    """
    return tuple(vectors_of(found) for found in moments(kind, pp, vpp, num_microbatches))


def vectors_of(found: Iterable[RankState]) -> tuple[InFlight, ...]:
    """The non-dominated vectors of one rank's moments."""
    maximal = non_dominated((*moment.in_flight, *moment.waiting) for moment in found)
    return tuple(InFlight(vector[: len(vector) // 2], vector[len(vector) // 2 :]) for vector in maximal)


def peak_bytes(vectors: Iterable[InFlight], full_bytes: Sequence[int], pending_bytes: Sequence[int]) -> int:
    """The most a rank's microbatches keep at once: the largest dot product, see `InFlight.total_bytes`."""
    return max(vector.total_bytes(full_bytes, pending_bytes) for vector in vectors)


@lru_cache(maxsize=512)
def receive_buffers(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Boundary tensors that each rank keeps to receive into: one for each microbatch, for the whole run.

    Source: `torch.distributed.pipelining.stage`, whose receive infos are made for all microbatches at the first step.

    Returns:
        For each pp rank and chunk: (activations from the slot before, gradients from the slot after), in boundaries. The first slot
        receives no activation, the last no gradient, and the middle slots of a V nothing from each other: they are on one rank.

    Raises:
        MegaplanError: MP310 for a kind that is no schedule.
    """
    where = placement(kind)
    owners = [slot_owner(where, slot, pp)[0] for slot in range(pp * vpp)]
    between = [num_microbatches if owner != after else 0 for owner, after in pairwise(owners)]  # what neighbouring slots send each other
    before, after = [0, *between], [*between, 0]
    owned = [slots_of_rank(where, rank, pp, vpp) for rank in range(pp)]
    return tuple([tuple([(before[slot], after[slot]) for slot in slots]) for slots in owned])
