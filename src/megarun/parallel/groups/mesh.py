"""The process group and its two meshes, which read the same ranks row-major.

Dense tensors use (pp, dp_replicate, dp_shard, cp, tp), tp fastest; expert banks (pp, dp_replicate, efsdp, ep, etp), etp fastest (R-31). EP
adds no ranks: its groups are consecutive ranks of tp, cp and dp_shard, and the remaining ranks of these axes shard the banks.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaplan.layout.ranks import EXPERT_AXES, MESH_AXES, expert_coordinate
from megaplan.spec import models as spec

AXES = MESH_AXES


@dataclass(frozen=True, slots=True)
class RankMesh:
    """This rank's position in the mesh.

    Attributes:
        device: Device of its tensors.
        axes: Device mesh with one dim per axis of `AXES`.
        experts: Device mesh of the same ranks for expert banks, one dim per axis of `EXPERT_AXES`; `axes` if the two are equal.
        rank: Global rank.
        coordinate: Index along each axis.
        expert_coordinate: Index along each axis of the expert mesh.
        parts: Meshes of `parts_mesh` by their arguments.
    """

    device: torch.device
    axes: DeviceMesh
    experts: DeviceMesh
    rank: int
    coordinate: dict[str, int]
    expert_coordinate: dict[str, int]
    parts: dict[tuple[int, bool], DeviceMesh] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """Degree of an axis."""
        return self.axes.size(AXES.index(axis))

    def expert_size(self, axis: str) -> int:
        """Degree of ep or etp; 1 if the expert mesh is the dense mesh, which has neither axis."""
        return 1 if self.experts is self.axes else self.experts.size(EXPERT_AXES.index(axis))

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different sequences."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def data_rank(self) -> int:
        """Index among the ranks that read different sequences, dp_shard fastest."""
        return self.coordinate["dp_replicate"] * self.size("dp_shard") + self.coordinate["dp_shard"]

    @property
    def state_mesh(self) -> DeviceMesh:
        """Mesh over which FSDP2 shards (dp_shard) and, if dp_replicate > 1, replicates (HSDP)."""
        return self.axes["dp_replicate", "dp_shard"] if self.size("dp_replicate") > 1 else self.axes["dp_shard"]

    @property
    def bank_mesh(self) -> DeviceMesh:
        """Mesh over which FSDP2 shards expert banks (efsdp) and, if dp_replicate > 1, replicates."""
        shards = "dp_shard" if self.experts is self.axes else "efsdp"
        return self.experts["dp_replicate", shards] if self.size("dp_replicate") > 1 else self.experts[shards]

    def parts_mesh(self, size: int, *, bank: bool) -> DeviceMesh:
        """Groups of this size of neighbouring ranks that share dense tensors, or banks: the second dim. Collective the first time."""
        if (size, bank) not in self.parts:
            axes = self.experts if bank else self.axes
            shards = axes.mesh_dim_names.index("efsdp" if bank and axes is not self.axes else "dp_shard") if axes.mesh_dim_names else 0
            self.parts[size, bank] = DeviceMesh(self.device.type, axes.mesh.movedim(shards, -1).reshape(-1, size))
        return self.parts[size, bank]

    def copies_group(self, *, bank: bool) -> dist.ProcessGroup | None:
        """The ranks with copies of this rank's dense tensors, or of its expert banks, under `sharding.mode: ddp`; None if there is one."""
        axes = self.experts if bank else self.axes
        names = [name for name in ("dp_replicate", "efsdp" if bank and axes is not self.axes else "dp_shard") if axes[name].size() > 1]
        if not names:
            return None
        mesh = axes[tuple(names)] if len(names) > 1 else axes[names[0]]
        return (mesh._flatten() if len(names) > 1 else mesh).get_group()

    def sum(self, value: torch.Tensor, *axes: str) -> torch.Tensor:
        """`value` summed in place over the named axes."""
        for axis in axes:
            if self.size(axis) > 1:
                dist.all_reduce(value, group=self.axes[axis].get_group())
        return value


def build_mesh(mesh: spec.Mesh, device: torch.device) -> RankMesh:
    """The mesh of the running process group, whose size must be `mesh.world_size`; every rank calls it once."""
    axes = _axes(mesh, AXES, device)
    separate = mesh.cp * mesh.tp * mesh.ep * mesh.etp > 1
    experts = _axes(mesh, EXPERT_AXES, device) if separate else axes
    rank = dist.get_rank()
    place = axes.get_coordinate()
    if place is None:
        raise RuntimeError(f"rank {rank} is outside the mesh {dict(zip(AXES, axes.shape, strict=True))}")
    return RankMesh(device, axes, experts, rank, dict(zip(AXES, place, strict=True)), expert_coordinate(mesh, rank))


def _axes(mesh: spec.Mesh, names: tuple[str, ...], device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(getattr(mesh, axis) for axis in names), mesh_dim_names=names)
