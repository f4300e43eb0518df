"""Gradients of blocks that more than one stage holds (R-62): a tied head's embedding on the first and the last stage of the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megaplan.layout.values import Layout
from megarun.parallel.mesh import RankMesh


class SharedGradients:
    """Sums the gradients of shared blocks over the stages that hold them.

    Groups are created here, by every rank for every coordinate in the same order, members or not.
    """

    def __init__(self, layout: Layout, mesh: RankMesh) -> None:
        self._group: dist.ProcessGroup | None = None
        holders = sorted({slot.pp_rank for slot in layout.slots if "embedding" in slot.blocks})
        if len(holders) < 2:
            return
        per_stage = mesh.axes.size() // mesh.size("pp")  # ranks are row-major, pp slowest
        for column in range(per_stage):
            members = [stage * per_stage + column for stage in holders]
            group = dist.new_group(members)
            if mesh.rank in members:
                self._group = group

    def reduce(self, stages: Iterable[nn.Module]) -> None:
        """Sum the embedding's sharded gradient in place over every stage that holds it, on this rank and on others.

        Args:
            stages: This rank's; nothing to do where none shares a block.
        """
        holders = [stage for stage in stages if hasattr(stage, "embedding")]
        if self._group is None and len(holders) < 2:
            return
        total, *others = [_gradient(stage) for stage in holders]
        for gradient in others:
            total.add_(gradient)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        for gradient in others:
            gradient.copy_(total)


def _gradient(stage: nn.Module) -> Tensor:
    gradient = stage.get_parameter("embedding.weight").grad
    if gradient is None:
        raise RuntimeError("embedding.weight has no gradient to share; backward did not reach it")
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
