"""What order a torch schedule class really executes, found by running it over a stage that only takes notes.

torch's own listing (`pipeline_order`) is not what runs: in torch 2.13 the last rank of `Schedule1F1B` lists forwards 1 … M for 0 … M − 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from megaplan.schedule import actions
from megaplan.spec.models import Spec
from megarun.errors import refusal

Executed = tuple[str, int]  # kind (F, B) and microbatch


class _NoteTaker:
    """Stands in for a pipeline stage: no communication, and every computation is noted."""

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_size, self.group_rank = num_stages, stage_index
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.has_backward = True
        self.notes: list[Executed] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.notes.append(("F", microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.notes.append(("B", microbatch))

    def perform_reduce_grad(self, _: int) -> None:
        """The reduction that ends every step."""

    def _no_operations(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_operations


def executed_order(kind: type[PipelineScheduleSingle], stage_index: int, num_stages: int, num_microbatches: int) -> list[Executed]:
    """The computations that one stage runs under a single-stage schedule class, in order."""
    notes = _NoteTaker(stage_index, num_stages)
    schedule = kind(notes, num_microbatches)  # type: ignore[arg-type]
    schedule._initialize_stage = lambda *_, **__: None  # type: ignore[method-assign]
    schedule._step_microbatches()
    return notes.notes


def check_order(kind: type[PipelineScheduleSingle], stage_index: int, spec: Spec) -> None:
    """Refuse a torch schedule that does not execute this stage's actions in megaplan's order.

    Raises:
        MegaplanError: MP606, naming rank and position.
    """
    mesh, num_microbatches = spec.mesh, spec.schedule.num_microbatches
    planned = [str(action) for action in actions(spec.schedule.kind, mesh.pp, mesh.vpp, num_microbatches)[stage_index]]
    executed = [f"{stage_index}{letter}{index}" for letter, index in executed_order(kind, stage_index, mesh.pp, num_microbatches)]
    if planned == executed:
        return
    longest = max(len(planned), len(executed))
    pairs = zip(planned + ["nothing"] * longest, executed + ["nothing"] * longest, strict=False)
    position, (ours, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    detail = f"pp rank {stage_index}, position {position}: the plan has {ours}, {kind.__name__} of torch {torch.__version__} runs {theirs}"
    raise refusal("MP606", detail, "schedule.kind")
