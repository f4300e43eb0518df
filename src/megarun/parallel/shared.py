"""Gradients of blocks that more than one stage holds (R-62): a tied head's embedding on the first and the last stage."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
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

    def reduce(self, stage: nn.Module) -> None:
        """Sum the embedding's sharded gradient in place; nothing to do on a stage that shares no block."""
        if self._group is not None:
            gradient = stage.get_parameter("embedding.weight").grad
            if gradient is None:
                raise RuntimeError("embedding.weight has no gradient to share; backward did not reach it")
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._group)
