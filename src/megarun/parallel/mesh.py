"""The process group and the device mesh (pp, dp_replicate, dp_shard, cp, tp), row-major, tp fastest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaplan.spec import models as spec

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class RankMesh:
    """This rank's place.

    Attributes:
        device: Where its tensors live.
        axes: The whole mesh, one dim per axis of `AXES`.
        rank: Global rank.
        coordinate: Index on each axis.
    """

    device: torch.device
    axes: DeviceMesh
    rank: int
    coordinate: dict[str, int]

    def size(self, axis: str) -> int:
        """Degree of an axis."""
        return self.axes.size(AXES.index(axis))

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def data_rank(self) -> int:
        """Index among the ranks that read different sequences, dp_shard fastest."""
        return self.coordinate["dp_replicate"] * self.size("dp_shard") + self.coordinate["dp_shard"]

    @property
    def state_mesh(self) -> DeviceMesh:
        """What FSDP2 shards over: dp_shard, and replicates over dp_replicate where that is more than one (HSDP)."""
        return self.axes["dp_replicate", "dp_shard"] if self.size("dp_replicate") > 1 else self.axes["dp_shard"]

    def sum(self, value: torch.Tensor, *axes: str) -> torch.Tensor:
        """`value` summed in place over the named axes."""
        for axis in axes:
            if self.size(axis) > 1:
                dist.all_reduce(value, group=self.axes[axis].get_group())
        return value


def build_mesh(mesh: spec.Mesh, device: torch.device) -> RankMesh:
    """The mesh of the running process group, whose size must be `mesh.world_size`; every rank calls it once."""
    shape = tuple(getattr(mesh, axis) for axis in AXES)
    axes = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    place = axes.get_coordinate()
    if place is None:
        raise RuntimeError(f"rank {dist.get_rank()} is outside the mesh {dict(zip(AXES, shape, strict=True))}")
    return RankMesh(device, axes, dist.get_rank(), dict(zip(AXES, place, strict=True)))
