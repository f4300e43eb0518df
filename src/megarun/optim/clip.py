"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megarun.parallel.groups.mesh import RankMesh


@torch.no_grad()
def clip_gradients(
    owned: Iterable[Tensor], copies: Iterable[Tensor], mesh: RankMesh, largest_norm: float | None, read: Callable[[Tensor], float] = float
) -> float:
    """Scale every gradient in place so that their global norm is at most `largest_norm`.

    Squares are summed in fp64, so that the norm does not depend on the sharding, up to the last bits of an fp64 sum. On a GPU all
    gradients are read in place, with 8 B of partial sums per 65,536 elements; `torch.linalg.vector_norm` would first copy each to fp64,
    8 B per element of the largest shard.

    Args:
        owned: Parameters whose shards this rank counts towards the norm.
        copies: Parameters that another rank counts, of another stage or of its CP or TP group; they are scaled equally.
        mesh: Mesh of the rank: shards are summed over dp_shard, those of expert banks over cp, parts over tp, stages over pp.
        largest_norm: Maximum norm; None to measure without clipping.
        read: Function that returns a scalar's value on the host.

    Returns:
        The norm before clipping.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (`foreach_tensor_norm_cuda`); ReduceOpsUtils.h (`make_reduction`).
    """
    gradients = [_local_gradient(p) for p in owned]
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for length in torch._foreach_norm(gradients, 2, dtype=torch.float64) if gradients else ():  # a CP rank may own no parameter
        squares += length.square()
    norm = read(mesh.sum(squares, "dp_shard", "cp", "tp", "pp").sqrt())
    scaled = [*gradients, *(_local_gradient(p) for p in copies)]
    if largest_norm is not None and norm > largest_norm and scaled:
        torch._foreach_mul_(scaled, largest_norm / norm)
    return norm


def _local_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} has no gradient; backward did not reach it")
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
