"""Pairs of a forward and a backward whose exchanges of experts' rows overlap with each other's computations (`host.moe_overlap`).

torch's runtime of pipeline actions runs the two parts of `OVERLAP_F_B` one after the other. Here they take turns at every exchange of rows
(`megarun.parallel.groups.turns`). Before and after its computation each does the same as torch's runtime for a single action; the messages
of both are sent after the pair.

If both parts belong to one stage, a forward meets layers whose backward has begun. FSDP2 takes a forward of such a layer for a recompute,
and sets no hooks for the backward of its microbatch, whose gradients would then not be summed before the end of that backward. A unit of
several layers may be in the middle of its forward when a backward runs or ends, at whose end FSDP2 forgets what is left of the forward.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.pipelining.schedules import OVERLAP_F_B, _wait_batch_p2p

from megarun.parallel.apply.gradients import groups_of
from megarun.parallel.groups.turns import Turns


def interleave_pairs(schedule: Any, stages: Sequence[nn.Module], device: torch.device) -> None:
    """Make a schedule run its pairs in turns."""
    for stage in stages:
        _let_forwards_in(stage)

    def pair(action: Any, ctx: Any) -> None:
        forward, backward = action.sub_actions
        Turns(partial(_forward, forward, ctx), partial(_backward, backward, ctx), device).run()

    schedule.register_custom_function(OVERLAP_F_B, pair)


def _let_forwards_in(stage: nn.Module) -> None:
    """Make FSDP2 run every forward of a layer as one; recompute calls no layer."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]  # set by torch's `contract`
            state._modules_to_run_forward = set()  # replaces the state of FSDP2's hooks, which the end of a backward clears
            continues = () if module is state._modules[0] else (state, *groups_of(module))
            module.register_forward_pre_hook(partial(_begins, state, continues), prepend=True)
            module.register_forward_hook(partial(_ends, state, groups_of(module)), prepend=True)


def _begins(state: Any, continues: Sequence[Any], *_: Any) -> None:
    """Run a layer's forward within its unit as if nothing else had run since the previous layer."""
    if state._training_state is TrainingState.PRE_BACKWARD:
        state._training_state = TrainingState.FORWARD
    for each in continues:
        each._training_state = TrainingState.FORWARD


def _ends(state: Any, groups: Sequence[Any], *_: Any) -> None:
    """Keep a layer gathered whose backward began during its forward; FSDP2 would free it and gather it again."""
    for each in (state, *groups):
        each._training_state = TrainingState.FORWARD


def _forward(action: Any, ctx: Any) -> None:
    schedule, stages = ctx.schedule_ref, _stages(ctx)
    index, microbatch = action.stage_index, action.microbatch_index
    stage, after = stages[index], stages.get(index + 1)
    if not stage.is_first and index - 1 not in stages:
        _wait_batch_p2p(schedule.fwd_recv_ops.pop((index, microbatch)))
    output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch], save_forward_output=False)
    schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
    if after is not None:
        after.set_local_fwd_input(output, microbatch)


def _backward(action: Any, ctx: Any) -> None:
    schedule, stages = ctx.schedule_ref, _stages(ctx)
    index, microbatch = action.stage_index, action.microbatch_index
    stage, before = stages[index], stages.get(index - 1)
    if not stage.is_last and index + 1 not in stages:
        _wait_batch_p2p(schedule.bwd_recv_ops.pop((index, microbatch)))
    loss = schedule._maybe_get_loss(stage, microbatch)
    schedule.backward_counter[index] += 1
    last = schedule.backward_counter[index] == schedule._n_microbatches
    stage.backward_one_chunk(microbatch, loss=loss, full_backward=True, last_backward=last)
    if before is not None:
        before.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


def _stages(ctx: Any) -> dict[int, Any]:
    return {stage.stage_index: stage for stage in ctx.schedule_ref._stages}
