"""Initialises every parameter from a generator seeded by hash(seed, full name), equally for every layout and device."""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megaplan.inventory.tensors import Init, Inventory, ParamTensor
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.ownership import local_part, local_shard
from megarun.parallel.groups.packed import pack_part, packings

STD = 0.02


def initialise(stage: nn.Module, inventory: Inventory, seed: int, mesh: RankMesh | None = None) -> None:
    """Initialise a materialised stage in place; a sharded parameter gets its shard of the full tensor's values.

    Random values for a shard would be equal on every rank; initialising and slicing the full tensor makes values depend only on the name,
    so that all layouts start equal.

    Args:
        stage: Stage whose parameters are the rank's parts, sharded by FSDP2 or not.
        inventory: Initialisation rules of all tensors.
        seed: Seed of the run.
        mesh: This rank's position in the mesh; None if no tensor is sharded.
    """
    tensors, packed = dict(inventory.tensors()), packings(stage)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            whole = fill(tensors[name], name, seed, len(inventory.layers))
            if name in packed:
                part = pack_part(tensors[name], whole, packed[name], mesh)
            else:
                whole = whole.to(parameter.dtype)
                part = (whole if mesh is None else local_part(tensors[name], whole, mesh)).reshape(parameter.shape)  # a bank's rows
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(local_shard(part, parameter))
            else:
                parameter.copy_(part)


def fill(tensor: ParamTensor, name: str, seed: int, num_layers: int) -> Tensor:
    """The full tensor in fp32 on the CPU, by its `Init` rule.

    Args:
        tensor: Inventory entry with shape and rule.
        name: Full name in the inventory.
        seed: Seed of the run.
        num_layers: Number of layers; output projections are scaled by 1/sqrt(2 · num_layers). Source: GPT-2
            (Radford et al. 2019), section 2.3.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    whole = torch.empty(tensor.shape)
    match tensor.init:
        case Init.NORMAL:
            whole.normal_(0, STD, generator=generator)
        case Init.NORMAL_OUT:
            whole.normal_(0, STD / math.sqrt(2 * num_layers), generator=generator)
        case Init.ONES:
            whole.fill_(1)
        case Init.ZEROS:
            whole.zero_()
        case Init.RANK_MEAN:
            whole.fill_(1 / tensor.shape[1])
        case Init.A_LOG:
            whole.uniform_(1, 16, generator=generator).log_()
        case Init.DT_BIAS:
            dt = whole.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
            whole = dt + torch.log(-torch.expm1(-dt))
        case Init.XIELU:
            whole = torch.tensor([0.8, 0.8 - 0.5]).expm1_().log_()
        case Init.CONV:
            bound = 1 / math.sqrt(tensor.shape[-1])
            whole.uniform_(-bound, bound, generator=generator)
    return whole
