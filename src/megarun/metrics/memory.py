"""Allocated bytes of each rank, and the plan's estimate of them."""

import torch
import torch.distributed as dist

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megarun.engine.trainer import Trainer
from megarun.job.job import Job

STEADY = (Phase.FORWARD_BACKWARD, Phase.OPTIMIZER)


def allocated_bytes(trainer: Trainer) -> tuple[list[int], str]:
    """Each rank's bytes and their basis (see `StepMetrics`); resets the peak counter. Collective."""
    device = trainer.mesh.device
    if device.type == "cuda":
        count, basis = torch.cuda.max_memory_allocated(device), "peak"
        torch.cuda.reset_peak_memory_stats(device)
    else:
        count, basis = trainer.resident_bytes(), "resident"
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    counts[trainer.mesh.rank] = count
    dist.all_reduce(counts)
    return counts.tolist(), basis


def planned_bytes(job: Job) -> list[int]:
    """The estimated allocated bytes of each rank: the peak of a step after the first."""
    budget = build_budget(job.spec, job.inventory, job.layout)
    planned = [0] * job.spec.mesh.world_size
    for group in budget.ranks:
        peak = max(sum(group.cells[phase].values()) - group.cells[phase][Column.OVERHEAD] for phase in STEADY)
        for rank in group.ranks:
            planned[rank] = peak
    return planned
