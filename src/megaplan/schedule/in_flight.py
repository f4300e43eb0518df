"""How many microbatches are alive at once, chunk by chunk: the integers that multiply the saved-activation ledger.

A microbatch is in flight on a chunk from the start of its forward to the end of its backward. Where the backward is split, the end of I
frees what only the input gradient needed, and what W still needs stays until the end of W: full, then pending. Chunks do not peak
together, so a rank's peak is the largest dot product of a vector below with the bytes of its chunks, never the sum of each chunk's own
maximum. An overlapped forward begins before the backward beside it has freed anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megaplan.schedule.actions import Kind, Step, computations
from megaplan.schedule.placement import slot_owner, slots_of_rank
from megaplan.schedule.registry import actions, placement

Vector = tuple[int, ...]


class InFlight(NamedTuple):
    """Microbatches alive at one moment of a rank, for each of its chunks.

    Attributes:
        full: Forward begun, I (or the whole backward) not ended.
        pending_weight: I ended, W not.
    """

    full: Vector
    pending_weight: Vector

    def weighed(self, full_bytes: Sequence[int], pending_bytes: Sequence[int]) -> int:
        """Bytes of this moment.

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
    orders, where = actions(kind, pp, vpp, num_microbatches), placement(kind)
    chunks = [slot_owner(where, slot, pp)[1] for slot in range(pp * vpp)]
    return tuple(vectors_of(order, chunks, vpp) for order in orders)


def vectors_of(order: tuple[Step, ...], chunks: Sequence[int], vpp: int) -> tuple[InFlight, ...]:
    """The non-dominated vectors of one rank's order.

    Args:
        order: The rank's actions.
        chunks: Chunk of every slot.
        vpp: Chunks of the rank.
    """
    maximal = non_dominated(_counts(order, chunks, vpp))
    return tuple(InFlight(vector[:vpp], vector[vpp:]) for vector in maximal)


def peak_bytes(vectors: Iterable[InFlight], full_bytes: Sequence[int], pending_bytes: Sequence[int]) -> int:
    """The most a rank's microbatches keep at once: the largest dot product, see `InFlight.weighed`."""
    return max(vector.weighed(full_bytes, pending_bytes) for vector in vectors)


@lru_cache(maxsize=64)
def receive_buffers(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Boundary tensors that each rank keeps to receive into: one for each microbatch, for the whole run.

    Source: `torch.distributed.pipelining.stage`, whose receive infos are made for all microbatches at the first step.

    Returns:
        For each pp rank and chunk: (activations from the slot before, gradients from the slot after), in boundaries. The first slot
        receives no activation, the last no gradient, and the middle slots of a V nothing from each other: they stand on one rank.

    Raises:
        MegaplanError: MP310 for a kind that is no schedule.
    """
    where = placement(kind)
    owners = [slot_owner(where, slot, pp)[0] for slot in range(pp * vpp)]
    between = [num_microbatches if owner != after else 0 for owner, after in pairwise(owners)]  # what neighbouring slots send each other
    before, after = [0, *between], [*between, 0]
    owned = [slots_of_rank(where, rank, pp, vpp) for rank in range(pp)]
    return tuple([tuple([(before[slot], after[slot]) for slot in slots]) for slots in owned])


def _counts(order: tuple[Step, ...], chunks: Sequence[int], vpp: int) -> set[Vector]:
    """Full and pending counts, one vector, at every moment that can be maximal: where something is freed next."""
    counts, seen, climbing = [0] * (2 * vpp), set(), False
    for action in computations(order):
        chunk = chunks[action.slot]
        if action.kind is Kind.FORWARD:
            counts[chunk] += 1
            climbing = True
            continue
        if climbing:
            seen.add(tuple(counts))
        counts[chunk if action.kind is not Kind.WEIGHT else vpp + chunk] -= 1
        climbing = action.kind is Kind.INPUT  # what was full is pending now: another vector, not a smaller one
        if climbing:
            counts[vpp + chunk] += 1
    if climbing:
        seen.add(tuple(counts))
    return seen


def non_dominated(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    """The vectors that no other one reaches in every component, sorted."""
    unique = set(vectors)
    kept = [v for v in unique if not any(v != other and all(a <= b for a, b in zip(v, other, strict=True)) for other in unique)]
    return tuple(sorted(kept))
