"""Counting changes nothing: a traced training step allocates what a plain one does, as torch's own profiler sees it."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from trace_checks import BF16

from megarun.data.batches import Batch
from megarun.engine.trainer import Trainer, sharded_stages
from megarun.job.job import Job
from megarun.parallel.groups.mesh import build_mesh
from megarun.trace.kept import FirstForward
from megarun.trace.owners import Owners
from megarun.trace.places import Places
from megarun.trace.rank import TracedTrainer

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
SMALLEST_BYTES = 1024  # below, the tracker's own counters and scalars on the host


def allocations(job: Job, *, traced: bool) -> list[Counter[int]]:
    """Sizes allocated in each of two steps."""
    mesh = build_mesh(job.spec.mesh, torch.device("cpu"))
    stages = sharded_stages(job, mesh)
    batch = torch.zeros(4, job.spec.batch.seq_length, dtype=torch.int64)
    found = []
    with ExitStack() as stack:
        if traced:
            places = Places(stages)
            owners = Owners(job.inventory, places, fake_only=False)
            first = FirstForward(owners, places, stages)
            for watched in (places.watching(), first.watching(), owners.watching(), owners.live):
                stack.enter_context(watched)
            trainer: Trainer = TracedTrainer(job, mesh, stages, owners, with_values=True)
        else:
            trainer = Trainer(job, mesh, stages)
        for step in range(2):
            if isinstance(trainer, TracedTrainer):
                trainer.start_step()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as measured:
                trainer.step(step, Batch(batch, batch))
            events = measured.profiler.kineto_results.events()  # type: ignore[union-attr]
            sizes = (event.nbytes() for event in events if event.name() == "[memory]")
            found.append(Counter(size for size in sizes if size >= SMALLEST_BYTES))
    return found


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("precision", [pytest.param(None, marks=pytest.mark.slow), BF16])
def test_a_traced_step_allocates_what_a_plain_one_does(job_with: Any, precision: dict[str, str] | None) -> None:
    """Size by size, in both steps: the hooks on gradients and on saved tensors, and the dispatch mode, cost no tensor byte."""
    job = job_with({"schedule.num_microbatches": 2} | ({"precision": precision} if precision else {}))
    plain, traced = allocations(job, traced=False), allocations(job, traced=True)
    assert sum(plain[0].values()) > 200
    assert traced == plain
