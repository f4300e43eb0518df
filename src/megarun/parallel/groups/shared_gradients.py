"""Gradients of parameters that several ranks replicate.

- Every block, if two ranks each have a copy of its stages (`schedule.kind: dualpipe`).
- A block on several stages (R-62): on the first and the last stage of the model the embedding of a tied head, and embeddings of the depths
  of multi-token prediction; on every stage with attention the relation bias.
- A replicated tensor under TP (R-16, R-17): norms, routers, MLA's down projections, R's q and k, the embedding and head. Each rank has the
  part of its gradient that comes from its local tokens or heads.
- Everything except expert banks under CP: each rank has the part that comes from its local tokens.

FSDP2 has already reduced over the data ranks, so a shard is summed here, in place, in `precision.grads`, once per step.
"""

from collections.abc import Iterable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaplan.layout.ranks import Layout
from megarun.parallel.groups.context import ContextParallel
from megarun.parallel.groups.local import local
from megarun.parallel.groups.mesh import RankMesh
from megarun.parallel.groups.tensor import TensorParallel


class SharedGradients:
    """Sums the gradients of shared blocks over their stages.

    Groups are created here, by every rank for every coordinate in the same order, members or not.
    """

    def __init__(self, layout: Layout, mesh: RankMesh) -> None:
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        copied = dict.fromkeys(name for slot in layout.slots for name in slot.copies)
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name in copied:
            holders = tuple(sorted({slot.pp_rank for slot in layout.slots if name in slot.blocks}))
            if holders not in groups:
                groups[holders] = _group_over(holders, mesh)
            self._groups[name] = groups[holders]

    def reduce(self, stages: Iterable[nn.Module]) -> None:
        """Sum the sharded gradients of shared blocks in place over all stages that have them, on this rank and on others.

        Args:
            stages: Stages of this rank; those without shared blocks are ignored.
        """
        shared: dict[tuple[str, str], list[Tensor]] = {}
        for stage in stages if self._groups else ():
            for name, parameter in stage.named_parameters():
                block = next((before for before in _prefixes(name) if before in self._groups), None)
                if block is not None and parameter.requires_grad:
                    shared.setdefault((name, block), []).append(local_gradient(parameter, name))
        for name, block in sorted(shared):  # the same order on all ranks, whose stages list their blocks in different orders
            total, *others = shared[name, block]
            for gradient in others:
                total.add_(gradient)
            group = self._groups[block]
            if group is not None:
                dist.all_reduce(total, group=group)
            for gradient in others:
                gradient.copy_(total)


def _prefixes(name: str) -> Iterable[str]:
    """The modules that a parameter is in: `layers`, `layers.2`, `layers.2.norm` for `layers.2.norm.weight`."""
    return accumulate(name.split(".")[:-1], "{}.{}".format)


def _group_over(holders: tuple[int, ...], mesh: RankMesh) -> dist.ProcessGroup | None:
    """This rank's group over pipeline ranks; None if there is one rank, or this rank is not among them."""
    found: dist.ProcessGroup | None = None
    if len(holders) < 2:
        return found
    per_stage = mesh.axes.size() // mesh.size("pp")  # ranks are row-major, pp slowest
    for column in range(per_stage):
        members = [stage * per_stage + column for stage in holders]
        group = dist.new_group(members)
        if mesh.rank in members:
            found = group
    return found


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
    return local(gradient)
