"""FSDP2: every parameter is sharded in `precision.master` and gathered in `precision.params`.

A stage whose parameters are unsharded on each data rank is not wrapped (`megarun.parallel.apply.whole`).

Wrapped bottom up (R-55): a layer's expert bank, then the unit, one layer or `sharding.wrap` consecutive ones, then the stage, with the
parameters outside the layers; a depth of multi-token prediction is a separate unit. With `sharding.wrap: stage` only the stage is
wrapped. The stage's group is never resharded after forward, because its backward follows immediately. Dense parameters are sharded over
dp_shard, an expert bank over efsdp, the ranks that own the same experts; dp_replicate has copies of both. Sharding is along dim 0, a
bank's rows (`ParamTensor.stored_shape`).

In forward FSDP2 gathers a unit when its first layer runs, which a GPU overlaps with the previous unit only if the host runs ahead. With EP
it does not: every E block waits for its row counts. So each unit gathers the next unit and its banks before it runs. A backward reads no
counts, so FSDP2's default prefetch of one group is sufficient. `sharding.prefetch` sets the number of units, for both.

With `sharding.reshard_size` a unit's gathered parameters are kept between forward and backward, in parts on that many neighbouring ranks.
torch's own integer for it makes a mesh of the ranks that share the unit, on which the ranks of other units do not call; here all do.
Gradients: with a pipeline, torch accumulates unsharded gradients from a stage's first backward to its last and reduces once; without one,
each microbatch reduces and accumulates in the shard. They are summed, not averaged: the loss is divided by the tokens of the global batch.
"""

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.moe import banks_of
from megarun.model.norm import used_dtype
from megarun.model.stage import Stage
from megarun.parallel.apply.gradients import groups_of
from megarun.parallel.apply.packed import pack_gathers
from megarun.parallel.apply.shards import reuse_freed_activations
from megarun.parallel.apply.whole import WholeState
from megarun.parallel.groups.mesh import RankMesh


def shard_stage(stage: Stage, spec: Spec, mesh: RankMesh) -> None:
    """Wrap a meta stage in place, units of layers and prediction depths in model order, then the stage."""
    if spec.has_whole_state:
        WholeState(stage, spec, mesh)
        return
    if not all(parameter.is_floating_point() for parameter in stage.parameters()):
        _take_bytes()
    where, reshard, keepers = mesh.state_mesh, spec.sharding.reshard_after_forward, spec.shard_keepers
    units = stage.units(spec.sharding.unit_layers)
    for unit in units:
        policy = _policy(spec, unit[0])
        for bank in chain.from_iterable(map(banks_of, unit)):
            _sum_gradients(fully_shard(bank, mesh=mesh.bank_mesh, mp_policy=policy, reshard_after_forward=reshard), mesh.bank_mesh)
            _keep_parts(bank, mesh, keepers[True], bank=True)
        fully_shard(unit, mesh=where, mp_policy=policy, reshard_after_forward=reshard)
        _sum_gradients(_wrapped(unit[0]), where)
        _keep_parts(unit[0], mesh, keepers[False], bank=False)
    _sum_gradients(fully_shard(stage, mesh=where, mp_policy=_policy(spec, stage), reshard_after_forward=False), where)
    reuse_freed_activations(stage)
    _keep_bytes(stage)
    pack_gathers(stage, spec)
    depth = spec.sharding.prefetch
    if depth or spec.mesh.experts_travel:
        _gather_ahead(stage, units, depth or 1)
    if depth and reshard:
        _gather_behind(stage, units, depth)


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


def _keep_parts(module: Any, mesh: RankMesh, keepers: int, *, bank: bool) -> None:
    """Make a group keep a part of its gathered parameters on each of these ranks after forward, if they are fewer than share it."""
    shards = mesh.bank_mesh if bank else mesh.state_mesh
    if keepers == shards.size(-1):
        return
    info = HSDPMeshInfo(mesh.parts_mesh(keepers, bank=bank), shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in groups_of(module):
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


class _Modules:
    """`torch.nn` for FSDP2 of torch 2.11, which makes each parameter with a gradient before it takes that away: bytes cannot have one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    @staticmethod
    def Parameter(data: torch.Tensor, requires_grad: bool | None = None) -> nn.Parameter:  # noqa: N802  (torch's name)
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)


def _take_bytes() -> None:
    """Make FSDP2 accept parameters of bytes, which torch 2.12 accepts without this."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        vars(_fsdp_param)["nn"] = _Modules()


def _keep_bytes(stage: Stage) -> None:
    """Gather packed rows without a cast: torch 2.11 would cast bytes to `param_dtype`, later versions do not."""
    modules: list[Any] = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    for parameter in (each for module in modules for group in groups_of(module) for each in group.fsdp_params):
        if not parameter.sharded_param.is_floating_point():
            parameter.init_dtype_attrs = partial(_without_cast, parameter)


def _without_cast(parameter: Any, policy: MixedPrecisionPolicy) -> None:
    type(parameter).init_dtype_attrs(parameter, replace(policy, param_dtype=None))


def _gather_ahead(stage: Stage, units: list[list[nn.Module]], depth: int) -> None:
    """Make every unit, and the stage before its first one, gather the groups of the next ones before it runs."""
    for index, module in enumerate((stage, *(unit[0] for unit in units))):
        _wrapped(module).set_modules_to_forward_prefetch(_groups(units[index : index + depth], 1))


def _gather_behind(stage: Stage, units: list[list[nn.Module]], depth: int) -> None:
    """Make every unit, and the stage after its last one, gather the groups of those before it runs backward."""
    for index, module in enumerate((*(unit[0] for unit in units), stage)):
        _wrapped(module).set_modules_to_backward_prefetch(_groups(units[max(0, index - depth) : index][::-1], -1))


def _groups(units: list[list[nn.Module]], step: int) -> list[Any]:
    """A wrapped module of each group of some units, in the order in which their layers run: forward with step 1, backward with −1."""
    return list(chain.from_iterable((unit[0], *chain.from_iterable(map(banks_of, unit[::step]))) for unit in units))


def _wrapped(module: Any) -> FSDPModule:
    return module  # type: ignore[no-any-return]
