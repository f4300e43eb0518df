"""Gradients of parameters that several ranks replicate.

- A block on two stages (R-62): on the first and the last stage of the model the embedding of a tied head, and embeddings of the depths of
  multi-token prediction.
- A replicated tensor under TP (R-16, R-17): norms, routers, MLA's down projections, R's q and k, the embedding and head. Each rank has the
  part of its gradient that comes from its local tokens or heads.
- Everything except expert banks under CP: each rank has the part that comes from its local tokens.

FSDP2 has already reduced over the data ranks, so a shard is summed here, in place, in `precision.grads`, once per step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megaplan.layout.values import Layout
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.tensor import TensorParallel


class SharedGradients:
    """Sums the gradients of shared blocks over their stages.

    Groups are created here, by every rank for every coordinate in the same order, members or not.
    """

    def __init__(self, layout: Layout, mesh: RankMesh) -> None:
        self._group: dist.ProcessGroup | None = None
        copied = layout.slots[-1].copies
        self._blocks = tuple(f"{name}." for name in copied)
        holders = sorted({slot.pp_rank for slot in layout.slots if not set(copied).isdisjoint(slot.blocks)})
        if len(holders) < 2:
            return
        per_stage = mesh.axes.size() // mesh.size("pp")  # ranks are row-major, pp slowest
        for column in range(per_stage):
            members = [stage * per_stage + column for stage in holders]
            group = dist.new_group(members)
            if mesh.rank in members:
                self._group = group

    def reduce(self, stages: Iterable[nn.Module]) -> None:
        """Sum the sharded gradients of shared blocks in place over all stages that have them, on this rank and on others.

        Args:
            stages: Stages of this rank; those without shared blocks are ignored.
        """
        shared: dict[str, list[Tensor]] = {}
        for stage in stages if self._blocks else ():
            for name, parameter in stage.named_parameters():
                if name.startswith(self._blocks) and parameter.requires_grad:
                    shared.setdefault(name, []).append(local_gradient(parameter, name))
        for total, *others in shared.values():
            for gradient in others:
                total.add_(gradient)
            if self._group is not None:
                dist.all_reduce(total, group=self._group)
            for gradient in others:
                gradient.copy_(total)


@torch.no_grad()
def sum_replicated(parameters: Iterable[tuple[str, nn.Parameter]], ranks: TensorParallel | ContextParallel) -> None:
    """Sum the gradients of replicated parameters over a TP or CP group, in place.

    Args:
        parameters: (name, parameter) pairs, equal on every rank of the group.
        ranks: TP or CP group.
    """
    works = [ranks.start_sum(local_gradient(parameter, name)) for name, parameter in parameters] if ranks.degree > 1 else []
    for work in works:
        work.wait()


def local_gradient(parameter: nn.Parameter, name: str) -> Tensor:
    """This rank's shard of a gradient."""
    gradient = parameter.grad
    if gradient is None:
        raise RuntimeError(f"{name} has no gradient to share; backward did not reach it")
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
