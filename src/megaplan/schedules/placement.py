"""The pipeline rank that owns each slot. Slots are numbered in model order, 0-based."""

from typing import Literal, assert_never

Placement = Literal["single", "loop", "v", "mirror"]
"""`single`: one slot per rank. `loop`: slot k on rank k mod pp, chunk k div pp. `v`: rank i owns slots i and 2·pp − 1 − i (R-27).

`mirror`: the model has pp parts and two copies, of which rank i owns part i and part pp − 1 − i. The slots of the second copy have numbers
pp to 2·pp − 1, so that owners are as in a V.
"""


def num_copies(placement: Placement) -> int:
    """Copies of the model that a pipeline holds; each has its own microbatches, an equal share."""
    return 2 if placement == "mirror" else 1


def slot_owner(placement: Placement, slot: int, pp: int) -> tuple[int, int]:
    """The pp rank and the chunk (virtual stage) of a slot.

    Args:
        placement: Assignment of slots to ranks.
        slot: Global slot index.
        pp: Pipeline degree.

    Raises:
        ValueError: If the placement has no such slot on `pp` ranks.
    """
    match placement:
        case "single":
            if not 0 <= slot < pp:
                raise ValueError(f"single placement on {pp} ranks has slots 0 to {pp - 1}, not {slot}")
            return slot, 0
        case "loop":
            if slot < 0:
                raise ValueError(f"slots count from 0, not {slot}")
            return slot % pp, slot // pp
        case "v" | "mirror":
            if not 0 <= slot < 2 * pp:
                raise ValueError(f"{placement} placement on {pp} ranks has slots 0 to {2 * pp - 1}, not {slot}")
            return (slot, 0) if slot < pp else (2 * pp - 1 - slot, 1)
        case _:
            assert_never(placement)


def slots_of_rank(placement: Placement, rank: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Slots of a pp rank, by chunk.

    Args:
        placement: Assignment of slots to ranks.
        rank: pp rank.
        pp: Pipeline degree.
        vpp: Slots per rank, of each copy: 1 for `single` and `mirror`, 2 for `v`.

    Raises:
        ValueError: If the placement cannot have `vpp` slots per rank, or the pipeline has no such rank.
    """
    if not 0 <= rank < pp:
        raise ValueError(f"a pipeline of {pp} ranks has no rank {rank}")
    required = {"single": 1, "v": 2, "mirror": 1}.get(placement, vpp)
    if vpp != required:
        raise ValueError(f"{placement} placement has {required} slots per rank, not {vpp}")
    if placement in ("v", "mirror"):
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * vpp, pp))
