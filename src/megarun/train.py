"""The reader's entry: one loop.

run     = what the plan says and the command line adds: spec, inventory, layout, tokens, folder, steps
mesh    = who this process is: (pp, dp_replicate, dp_shard, cp, tp)
trainer = this rank's stage, sharded, filled, with its schedule and optimizers
batches = this rank's rows of each step
"""

from __future__ import annotations

import time

import torch

from megarun.batches import Batches
from megarun.launch import Launch, choose_device, process_group
from megarun.metrics import FILE_NAME, MetricsFile, StepMetrics, allocated_bytes
from megarun.optim.build import learning_rate
from megarun.parallel.mesh import RankMesh, build_mesh
from megarun.prepare import Run
from megarun.progress import Display, print_summary
from megarun.trainer import Trainer


def train(run: Run, launch: Launch) -> list[StepMetrics]:
    """Train the run's job and return what every step measured; every process of the job calls it.

    Raises:
        MegaplanError: A device is missing, the folder holds a run, torch's schedule is another one, or a step is not finite.
    """
    device = choose_device(launch)
    with process_group(launch, device):
        mesh = build_mesh(run.job.spec.mesh, device)
        with MetricsFile(run.out, mesh.rank) as metrics_file, Display(run.num_steps, mesh.rank) as display:
            history = train_steps(run, mesh, metrics_file, display)
        if mesh.rank == 0:
            print_summary(run.job.spec.name, history, str(run.out / FILE_NAME))
    return history


def train_steps(run: Run, mesh: RankMesh, metrics_file: MetricsFile, display: Display) -> list[StepMetrics]:
    """Build the trainer, then step: read, train, measure, write."""
    job, training = run.job, run.job.spec.training
    trainer, batches = Trainer(job, mesh), Batches(run.source, job.spec, mesh)
    history: list[StepMetrics] = []
    for step in range(run.num_steps):
        began = time.perf_counter()
        result = trainer.step(step, *batches.at(step))
        seconds = synchronised_time(mesh.device) - began
        num_bytes, basis = allocated_bytes(trainer)
        metrics = StepMetrics(
            step=step + 1,
            loss=result.loss,
            tokens=job.global_batch_tokens,
            tokens_per_second=job.global_batch_tokens / seconds,
            allocated_bytes=num_bytes,
            allocated_basis=basis,
            grad_norm=result.gradient_norm,
            learning_rate=learning_rate(training.learning_rate, step, training.steps),
            step_seconds=seconds,
        )
        history.append(metrics)
        metrics_file.write(metrics)
        display.show(metrics)
    return history


def synchronised_time(device: torch.device) -> float:
    """Seconds on the wall clock once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
