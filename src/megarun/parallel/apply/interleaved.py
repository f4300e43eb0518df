"""Pairs of a forward and a backward whose experts' exchanges lie behind each other's computations (`host.moe_overlap`).

torch's runtime of pipeline actions runs the two parts of `OVERLAP_F_B` one after the other. Here they take turns at every exchange of rows
(`megarun.parallel.groups.turns`). What each does before and after its computation is what torch's runtime does for a single action; the
messages of both are sent after the pair.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining.schedules import OVERLAP_F_B, _wait_batch_p2p

from megarun.parallel.groups.turns import Turns


def interleave_pairs(schedule: Any, device: torch.device) -> None:
    """Make a schedule run its pairs in turns."""

    def pair(action: Any, ctx: Any) -> None:
        forward, backward = action.sub_actions
        Turns(partial(_forward, forward, ctx), partial(_backward, backward, ctx), device).run()

    schedule.register_custom_function(OVERLAP_F_B, pair)


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
