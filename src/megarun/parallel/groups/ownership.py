"""The part of a full tensor that a rank owns, after TP and EP and after FSDP2.

A part is a rank's share after TP and EP, before FSDP2 shards it over the data ranks:

- TP shards a tensor-parallel tensor along `tp_dim`. A fused projection is sharded part by part (`tp_parts`): rank r of 2 owns half r of the
  rows of each of Mamba's z, x, B, C and dt, so that its rows belong to the same heads.
- EP shards an expert bank along dim 0, its stack of experts, and ETP along `tp_dim`, their width; the part is stored as rows
  (`ParamTensor.stored_shape`).
- All other tensors are replicated: every rank owns the full tensor.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from megaplan.inventory.tensors import Owner, ParamTensor
from megarun.parallel.groups.mesh import RankMesh


def local_part(tensor: ParamTensor, whole: Tensor, mesh: RankMesh) -> Tensor:
    """The part of the unsharded tensor `whole` that this rank owns.

    Args:
        tensor: Inventory entry with owner rule, `tp_dim` and `tp_parts`.
        whole: Full parameter, gradient or update.
        mesh: This rank's position in the mesh.

    Returns:
        A view if it is one slice, else a copy.
    """
    if tensor.owner is Owner.TENSOR_PARALLEL:
        return tensor_part(tensor, whole, mesh.coordinate["tp"], mesh.size("tp"))
    if tensor.owner is Owner.EXPERT_PARALLEL:
        stack = whole.chunk(mesh.expert_size("ep"))[mesh.expert_coordinate["ep"]]  # MP203 ensures that they divide
        return tensor_part(tensor, stack, mesh.expert_coordinate["etp"], mesh.expert_size("etp"))
    return whole


def tensor_part(tensor: ParamTensor, whole: Tensor, index: int, degree: int) -> Tensor:
    """Part `index` of `degree` along `tp_dim`, of TP or ETP."""
    dim = tensor.tp_dim
    if degree == 1 or dim is None:
        return whole
    if not tensor.tp_parts:
        return _slice(tensor, whole, dim, index, degree)
    return torch.cat([_slice(tensor, part, dim, index, degree) for part in torch.split(whole, list(tensor.tp_parts), dim)], dim)


def _slice(tensor: ParamTensor, whole: Tensor, dim: int, index: int, degree: int) -> Tensor:
    size, left = divmod(whole.shape[dim], degree)
    if left:
        raise ValueError(f"{tensor.name}: {whole.shape[dim]} along dim {dim} is not divisible by {degree} ranks (MP201, MP206)")
    return whole.narrow(dim, index * size, size)


def local_shard(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's shard of `whole`, sharded like `like`; chunks as in `torch.chunk`."""
    local = whole
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            chunks = local.chunk(like.device_mesh.size(axis), placement.dim)
            index = like.device_mesh.get_local_rank(axis)
            local = chunks[index] if index < len(chunks) else local.narrow(placement.dim, 0, 0)
    return local
