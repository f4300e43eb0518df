"""How many microbatches are alive at once, chunk by chunk: the integers that multiply the saved-activation ledger.

A microbatch is in flight on a chunk from the start of its forward to the end of its backward. Chunks do not peak together, so a rank's
peak is the largest dot product of a vector below with the bytes of its chunks, never the sum of each chunk's own maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megaplan.schedule.actions import Action, Kind
from megaplan.schedule.placement import slot_owner, slots_of_rank
from megaplan.schedule.registry import actions, placement

Vector = tuple[int, ...]


def in_flight(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[Vector, ...], ...]:
    """The non-dominated vectors of simultaneously live microbatches.

    They follow from each rank's own order alone, whatever the actions' durations.

    Args:
        kind: `schedule.kind` of the spec.
        pp: Pipeline degree.
        vpp: Slots a rank.
        num_microbatches: Microbatches of one optimizer step.

    Returns:
        For each pp rank its vectors, in lexicographic order; a vector has one count for each chunk. No vector is at most another one in
        every chunk.

    Raises:
        MegaplanError: The schedule is not generated yet, or cannot run on these degrees.
    """
    orders, where = actions(kind, pp, vpp, num_microbatches), placement(kind)
    chunks = [slot_owner(where, slot, pp)[1] for slot in range(pp * vpp)]
    return tuple(non_dominated(_forward_counts(order, chunks, vpp)) for order in orders)


def receive_buffers(kind: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Boundary tensors that each rank keeps to receive into: one for each microbatch, for the whole run.

    Source: `torch.distributed.pipelining.stage`, whose receive infos are made for all microbatches at the first step.

    Returns:
        For each pp rank and chunk: (activations from the slot before, gradients from the slot after), in boundaries. The first slot
        receives no activation, the last no gradient.

    Raises:
        MegaplanError: MP310 for a kind that is no schedule.
    """
    where, last = placement(kind), pp * vpp - 1
    owned = (slots_of_rank(where, rank, pp, vpp) for rank in range(pp))
    return tuple(tuple((num_microbatches * (slot > 0), num_microbatches * (slot < last)) for slot in slots) for slots in owned)


def _forward_counts(order: Sequence[Action], chunks: Sequence[int], vpp: int) -> set[Vector]:
    """The counts where a backward follows a forward: only there can a vector be maximal."""
    counts, seen, climbing = [0] * vpp, set(), False
    for action in order:
        if action.kind is Kind.FORWARD:
            counts[chunks[action.slot]] += 1
            climbing = True
        elif action.kind is Kind.BACKWARD:
            if climbing:
                seen.add(tuple(counts))
            counts[chunks[action.slot]] -= 1
            climbing = False
        else:
            raise ValueError(f"{action}: a split backward has its own replay")
    return seen


def non_dominated(vectors: Iterable[Vector]) -> tuple[Vector, ...]:
    """The vectors that no other one reaches in every component, sorted."""
    unique = set(vectors)
    kept = [v for v in unique if not any(v != other and all(a <= b for a, b in zip(v, other, strict=True)) for other in unique)]
    return tuple(sorted(kept))
