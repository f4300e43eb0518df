"""FSDP2: every parameter is sharded in `precision.master` and gathered in `precision.params`.

A stage whose parameters one data rank has whole is not wrapped (`megarun.parallel.apply.whole`).

Wrapped bottom up (R-55): a layer's expert bank, then the layer, then the stage, with the parameters outside the layers; a depth of
multi-token prediction is wrapped as a layer is. The stage's group is never resharded after forward, because its backward follows
immediately. Dense parameters are sharded over dp_shard, an expert bank over efsdp, the ranks that own the same experts; dp_replicate has
copies of both. Sharding is along dim 0, a bank's rows (`ParamTensor.stored_shape`).

In forward FSDP2 gathers a layer when it runs, which a GPU overlaps with the previous layer only if the host runs ahead. With EP it does
not: every E block waits for its row counts. So each layer gathers the next layer and its bank before it runs. A backward reads no counts,
so FSDP2's default prefetch of one group is sufficient.
Gradients: with a pipeline, torch accumulates unsharded gradients from a stage's first backward to its last and reduces once; without one,
each microbatch reduces and accumulates in the shard. They are summed, not averaged: the loss is divided by the tokens of the global batch.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.moe import banks_of
from megarun.model.norm import used_dtype
from megarun.model.stage import Stage
from megarun.parallel.apply.shards import reuse_freed_activations
from megarun.parallel.apply.whole import WholeState
from megarun.parallel.groups.mesh import RankMesh


def shard_stage(stage: Stage, spec: Spec, mesh: RankMesh) -> None:
    """Wrap a meta stage in place, layers and prediction depths in model order, then the stage."""
    if spec.has_whole_state:
        WholeState(stage, spec, mesh)
        return
    where, reshard = mesh.state_mesh, spec.sharding.reshard_after_forward
    for block in stage.wrapped():
        policy = _policy(spec, block)
        for bank in banks_of(block):
            _sum_gradients(fully_shard(bank, mesh=mesh.bank_mesh, mp_policy=policy, reshard_after_forward=reshard), mesh.bank_mesh)
        _sum_gradients(fully_shard(block, mesh=where, mp_policy=policy, reshard_after_forward=reshard), where)
    _sum_gradients(fully_shard(stage, mesh=where, mp_policy=_policy(spec, stage), reshard_after_forward=False), where)
    reuse_freed_activations(stage)
    if spec.mesh.ep > 1:
        _gather_ahead(stage)


def _policy(spec: Spec, module: nn.Module) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=used_dtype(module, spec.precision),
        reduce_dtype=TORCH_DTYPES[spec.precision.reduce],
        cast_forward_inputs=False,  # it would cast the fp32 rotary tables to param_dtype; activations already have it
    )


def _sum_gradients(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Make a group's reduction sum over its mesh.

    With one rank, a division by the factor would allocate a copy of the unsharded gradients.
    """
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and a factor of 1 needs none
    if mesh.size() > 1:
        module.set_gradient_divide_factor(1.0)


def _gather_ahead(stage: Stage) -> None:
    """Make every layer or depth, and the stage before its first one, gather the next one's groups before it runs."""
    ahead: Any = stage
    for block in stage.wrapped():
        ahead.set_modules_to_forward_prefetch([block, *banks_of(block)])
        ahead = block
