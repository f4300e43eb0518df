"""Sets of ranks as half-open runs: `[[0, 4], [8, 12]]` for 0 to 3 and 8 to 11; any length takes a few bytes."""

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.schedules.placement import Placement
from megaplan.spec.models import Mesh

__all__ = ["Layout", "Placement", "Slot"]


class Slot(NamedTuple):
    """One pipeline stage slot.

    Attributes:
        index: Index in model order, 0-based; slots of a second copy of the model are after those of the first.
        pp_rank: Owner on the pp axis.
        chunk: Position among the rank's slots (virtual stage).
        start: First layer, global index.
        stop: One past the last layer.
        blocks: Names of the inventory blocks this slot holds, layers included, in execution order.
        copies: Blocks among them that are a second copy of another slot's block (tied head's embedding, MTP's embeddings, relation bias).
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

    @property
    def num_parts(self) -> int:
        """Slots of one copy of the model."""
        return self.pp * self.vpp

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The layers of each part of the model, in model order."""
        return tuple([(slot.start, slot.stop) for slot in self.slots[: self.num_parts]])

    def bounds(self, slot: Slot) -> tuple[bool, bool]:
        """True if the slot is the first of a copy of the model; and if it is the last."""
        return slot.index % self.num_parts == 0, (slot.index + 1) % self.num_parts == 0

    def of_rank(self, pp_rank: int) -> tuple[Slot, ...]:
        """The slots of a pipeline rank, by chunk."""
        return self.by_rank()[pp_rank]

    def by_rank(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of every pipeline rank, by chunk: in every placement a rank's chunks are in the order of the slots."""
        found: list[list[Slot]] = [[] for _ in range(self.pp)]
        for slot in self.slots:
            found[slot.pp_rank].append(slot)
        return tuple(map(tuple, found))


MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "etp")


def rank_coordinate(mesh: Mesh, rank: int) -> dict[str, int]:
    """`{axis: index}` of a rank on the mesh of dense parameters.

    Raises:
        ValueError: If the mesh has no such rank.
    """
    left, tp = divmod(rank, mesh.tp)
    left, cp = divmod(left, mesh.cp)
    left, dp_shard = divmod(left, mesh.dp_shard)
    pp, dp_replicate = divmod(left, mesh.dp_replicate)
    if not 0 <= pp < mesh.pp:
        raise ValueError(f"the mesh has ranks 0 to {mesh.world_size - 1}, not {rank}")
    return {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}


def expert_coordinate(mesh: Mesh, rank: int) -> dict[str, int]:
    """`{axis: index}` of a rank on the mesh of expert banks.

    Raises:
        ValueError: If the mesh has no such rank.
    """
    left, indices = rank, []
    for axis in reversed(EXPERT_AXES):
        left, index = divmod(left, getattr(mesh, axis))
        indices.append(index)
    if left:
        raise ValueError(f"the mesh has ranks 0 to {mesh.world_size - 1}, not {rank}")
    return dict(zip(EXPERT_AXES, reversed(indices), strict=True))


RankRun = tuple[int, int]

_SHOWN = 2


def runs_of(ranks: Sequence[int]) -> tuple[RankRun, ...]:
    """Ascending ranks as runs."""
    runs: list[RankRun] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1] = (runs[-1][0], rank + 1)
        else:
            runs.append((rank, rank + 1))
    return tuple(runs)


def joined(runs: Sequence[RankRun]) -> tuple[RankRun, ...]:
    """The same ranks in as few runs as possible, ascending; no rank may be in two runs."""
    found: list[RankRun] = []
    for start, stop in sorted(runs):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def num_ranks(runs: Sequence[RankRun]) -> int:
    """Ranks in the runs."""
    return sum(stop - start for start, stop in runs)


def runs_label(runs: Sequence[RankRun]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0-3, 8-11`; for many runs the first two, and the number of all ranks."""
    texts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in runs]
    count = num_ranks(runs)
    if len(texts) > _SHOWN:
        return f"ranks {', '.join(texts[:_SHOWN])} … ({count})"
    return f"{'rank' if count == 1 else 'ranks'} {', '.join(texts)}"
