"""The reader's entry: a plan, a token file, a folder; then one loop.

job     = what the plan says: spec, inventory, layout
mesh    = who this process is: (pp, dp_replicate, dp_shard, cp, tp)
trainer = this rank's stage, sharded, filled, with its schedule and optimizers
batches = this rank's rows of each step
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megaplan.spec.models import Training
from megarun.batches import Batches
from megarun.data import TokenFile
from megarun.errors import refusal
from megarun.job import Job
from megarun.launch import Launch, check_world_size, choose_device, process_group
from megarun.metrics import FILE_NAME, MetricsFile, StepMetrics, allocated_bytes
from megarun.optim.build import learning_rate
from megarun.parallel.mesh import RankMesh, build_mesh
from megarun.progress import Display, print_summary
from megarun.support import refuse_unbuilt
from megarun.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Run:
    """What the command line adds to a plan.

    Attributes:
        data: Token file.
        out: Folder for metrics.jsonl.
        steps: Optimizer steps; the learning rate's warm-up follows the plan's `training.steps` all the same.
        command: What the user typed after `megarun`, for hints.
    """

    data: Path
    out: Path
    steps: int
    command: str


def train_job(job: Job, run: Run, launch: Launch) -> list[StepMetrics]:
    """Train the job and return what every step measured; called by every process of the job.

    Raises:
        MegaplanError: The plan cannot be built, the processes are not the plan's, the data does not fit, or a step is not finite.
    """
    refuse_unbuilt(job.spec)
    check_world_size(job.spec, launch, run.command)
    device = choose_device(launch)
    with process_group(launch, device):
        mesh = build_mesh(job.spec.mesh, device)
        source = open_tokens(run.data, job)
        with MetricsFile(run.out, mesh.rank) as metrics_file, Display(run.steps, mesh.rank) as display:
            history = loop(job, run, mesh, Batches(source, job.spec, mesh), metrics_file=metrics_file, display=display)
        if mesh.rank == 0:
            print_summary(job.spec.name, history, str(run.out / FILE_NAME))
    return history


def loop(job: Job, run: Run, mesh: RankMesh, batches: Batches, *, metrics_file: MetricsFile, display: Display) -> list[StepMetrics]:
    """Build the trainer, then step: read, train, measure, write."""
    trainer, training = Trainer(job, mesh), job.spec.training
    history: list[StepMetrics] = []
    for step in range(run.steps):
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
            learning_rate=rate(training, step),
            step_seconds=seconds,
        )
        history.append(metrics)
        metrics_file.write(metrics)
        display.show(metrics)
    return history


def open_tokens(path: Path, job: Job) -> TokenFile:
    """The token file, whose ids must all have a row in the embedding."""
    source = TokenFile(path)
    if source.vocab_size > job.spec.model.vocab_size:
        detail = f"{path}: vocab_size = {source.vocab_size:,}, model.vocab_size = {job.spec.model.vocab_size:,}"
        raise refusal("MP605", detail, "model.vocab_size", (f"megaplan split SPEC --set model.vocab_size={source.vocab_size} -o PLAN",))
    return source


def rate(training: Training, step: int) -> float:
    """AdamW's learning rate at 0-based `step`."""
    return learning_rate(training.learning_rate, step, training.steps)


def synchronised_time(device: torch.device) -> float:
    """Seconds on the wall clock once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
