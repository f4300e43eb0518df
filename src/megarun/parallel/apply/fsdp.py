"""FSDP2: every parameter is a shard in `precision.master`, gathered in `precision.params`, on a one-rank mesh too.

Wrapped bottom up (R-55): a layer's expert bank, then the layer, then the stage, which holds what is outside the layers. The stage's own
group is never resharded after forward: its backward begins at once. Dense parameters are sharded over dp_shard, an expert bank over efsdp,
the ranks that own the same experts; dp_replicate holds copies of both. Cuts are along dim 0, a bank's rows (`ParamTensor.stored_shape`).

In forward FSDP2 gathers a layer when it runs, and a GPU overlaps that with the layer before only because the host is ahead. With EP the
host is not: every E block waits for its counts of rows. So each layer gathers the next one, and that one's bank, before it runs itself. A
backward reads no counts, and FSDP2's own order, one group ahead, is enough.
Gradients: with a pipeline, torch keeps whole gradients from a stage's first backward to its last and reduces once; without one, each
microbatch reduces and accumulates in the shard. They are summed, not averaged: the loss is divided by the tokens of the whole batch.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.moe import ExpertBlock
from megarun.model.stage import Stage
from megarun.parallel.groups.mesh import RankMesh


def shard_stage(stage: Stage, spec: Spec, mesh: RankMesh) -> None:
    """Wrap a meta stage in place, layers in model order, then the stage."""
    precision = spec.precision
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[precision.params],
        reduce_dtype=TORCH_DTYPES[precision.reduce],
        cast_forward_inputs=False,  # would turn the fp32 rotary tables into param_dtype; activations already have it
    )
    where, reshard = mesh.state_mesh, spec.sharding.reshard_after_forward
    for block in stage.layers.values():
        if isinstance(block, ExpertBlock):
            _sum_gradients(fully_shard(block.experts, mesh=mesh.bank_mesh, mp_policy=policy, reshard_after_forward=reshard), mesh.bank_mesh)
        _sum_gradients(fully_shard(block, mesh=where, mp_policy=policy, reshard_after_forward=reshard), where)
    _sum_gradients(fully_shard(stage, mesh=where, mp_policy=policy, reshard_after_forward=False), where)
    if spec.mesh.ep > 1:
        _gather_ahead(stage)


def _sum_gradients(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Let a group's reduction sum over its mesh.

    One rank alone would write a quotient by the factor, as large as the whole gradients, before it copies it.
    """
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and a factor of 1 needs none
    if mesh.size() > 1:
        module.set_gradient_divide_factor(1.0)


def _gather_ahead(stage: Stage) -> None:
    """Let every layer, and the stage before its first one, gather the next layer's groups before it runs."""
    ahead: Any = stage
    for block in stage.layers.values():
        ahead.set_modules_to_forward_prefetch([block, block.experts] if isinstance(block, ExpertBlock) else [block])
        ahead = block
