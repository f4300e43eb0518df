"""FSDP2: every parameter is a shard in `precision.master`, gathered in `precision.params`, on a one-rank mesh too.

Wrapped bottom up (R-55): a layer's expert bank, then the layer, then the stage, which holds what is outside the layers. The stage's own
group is never resharded after forward: its backward begins at once.
Gradients: with a pipeline, torch keeps whole gradients from a stage's first backward to its last and reduces once; without one, each
microbatch reduces and accumulates in the shard. They are summed, not averaged: the loss is divided by the tokens of the whole batch.
"""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.moe import ExpertBlock
from megarun.model.stage import Stage
from megarun.parallel.mesh import RankMesh


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
            fully_shard(block.experts, mesh=where, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(block, mesh=where, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(stage, mesh=where, mp_policy=policy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and a factor of 1 needs none
