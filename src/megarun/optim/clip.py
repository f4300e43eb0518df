"""The global gradient norm, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megarun.parallel.groups.local import gradient_of, local
from megarun.parallel.groups.mesh import RankMesh


@torch.no_grad()
def gradient_norm(owned: Iterable[Tensor], mesh: RankMesh) -> Tensor:
    """The global norm of the gradients, fp64, on the device.

    Squares are summed in fp64, so that the norm does not depend on the sharding, up to the last bits of an fp64 sum. On a GPU all
    gradients are read in place, with 8 B of partial sums per 65,536 elements; `torch.linalg.vector_norm` would first copy each to fp64,
    8 B per element of the largest shard.

    Args:
        owned: Parameters whose shards this rank counts: every gradient on exactly one rank.
        mesh: Mesh of the rank: shards are summed over dp_shard, shards of expert banks also over cp, parts over tp, stages over pp.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (`foreach_tensor_norm_cuda`); ReduceOpsUtils.h (`make_reduction`).
    """
    gradients = [local(gradient_of(p)) for p in owned]
    if gradients:
        squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square_().sum()
    else:  # a CP rank may own no parameter
        squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    return mesh.sum(squares, "dp_shard", "cp", "tp", "pp").sqrt()


def clip_factor(norm: float, largest_norm: float | None) -> float:
    """The factor of every gradient with which their global norm, which is `norm`, is at most `largest_norm`; None clips nothing."""
    return largest_norm / norm if largest_norm is not None and norm > largest_norm else 1.0
