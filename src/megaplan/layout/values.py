"""The values of a layout: cuts, slots, stages and rank coordinates."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.schedules.placement import Placement

__all__ = ["Layout", "Placement", "Slot"]


class Slot(NamedTuple):
    """One pipeline stage slot.

    Attributes:
        index: Index in model order, 0-based.
        pp_rank: Owner on the pp axis.
        chunk: Position among the rank's slots (virtual stage).
        start: First layer, global index.
        stop: One past the last layer.
        blocks: Names of the inventory blocks this slot holds, layers included, in execution order.
        copies: Those of the blocks that are a second copy of another slot's block (tied head's embedding, MTP's embeddings, relation bias).
    """

    index: int  # type: ignore[assignment]  # its place; a tuple's method of that name is not missed
    pp_rank: int
    chunk: int
    start: int
    stop: int
    blocks: tuple[str, ...]
    copies: tuple[str, ...] = ()


class Layout(NamedTuple):
    """Slots of a cut model, and its mesh."""

    placement: Placement
    slots: tuple[Slot, ...]
    pp: int
    vpp: int

    def of_rank(self, pp_rank: int) -> tuple[Slot, ...]:
        """The slots of a pipeline rank, by chunk."""
        return self.by_rank()[pp_rank]

    def by_rank(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of every pipeline rank, by chunk: in every placement a rank's later chunk is also later in the model."""
        found: list[list[Slot]] = [[] for _ in range(self.pp)]
        for slot in self.slots:
            found[slot.pp_rank].append(slot)
        return tuple(map(tuple, found))
