"""The training loop; start reading megarun here.

run     = settings of the plan and the command line: spec, inventory, layout, tokens, folder, steps
mesh    = this process's coordinates: (pp, dp_replicate, dp_shard, cp, tp)
trainer = this rank's stages, sharded and initialised, with their schedule and optimizers
batches = this rank's rows of each step
keeper  = checkpoints: the one to start from, and when to save
evaluator = the loss of held-out tokens, at intervals
guard   = bad steps: the batch of each step, and whether its update is applied
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megarun.checkpoint.keeper import Keeper
from megarun.data.batches import Batches
from megarun.engine.trainer import Trainer, sharded_stages
from megarun.job.run import Run
from megarun.launch.interrupt import Interrupt
from megarun.launch.process_group import Launch, choose_device, process_group
from megarun.metrics.display import Display
from megarun.metrics.file import MetricsFile
from megarun.metrics.memory import allocated_bytes, planned_bytes
from megarun.metrics.records import RankMemory, StepMetrics, routing_keys
from megarun.metrics.utilisation import Utilisation
from megarun.optim.rates import learning_rate
from megarun.parallel.groups.mesh import RankMesh, build_mesh
from megarun.training.agreement import require_agreement
from megarun.training.bad_steps import StepGuard
from megarun.training.evaluation import Evaluator


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a run.

    Attributes:
        history: Metrics of every step since this start.
        stopped_by: Signal number that ended the run before its last step; 0 if none.
    """

    history: list[StepMetrics]
    stopped_by: int


def train(run: Run, launch: Launch) -> Trained:
    """Train the run's job; every process of the job calls it.

    Raises:
        MegaplanError: A device is missing, the ranks' settings differ, the folder already has a run, torch's schedule differs from the
            plan's, or too many steps are bad.
    """
    device = choose_device(launch)
    require_agreement(run, launch, device.type)
    with Interrupt() as interrupt, process_group(launch, device):
        mesh = build_mesh(run.job.spec.mesh, device)
        keeper = Keeper(run)
        start = keeper.find()
        with (
            MetricsFile(run.out, mesh.rank, resumed=start is not None or launch.restarted, tensorboard=run.tensorboard) as metrics_file,
            Display(run.num_steps, mesh.rank) as display,
        ):
            trained = train_steps(run, mesh, keeper, interrupt, metrics_file, display)
    return trained


def train_steps(run: Run, mesh: RankMesh, keeper: Keeper, interrupt: Interrupt, metrics_file: MetricsFile, display: Display) -> Trained:
    """Build the trainer, then step: read, train, measure, write, save."""
    job, training = run.job, run.job.spec.training
    trainer = Trainer(job, mesh, sharded_stages(job, mesh, compiled=run.compiled))
    batches = Batches(run.source, job.spec, mesh)
    guard = StepGuard(training.bad_steps, keeper, trainer)
    step = guard.start()
    held_out, utilisation = run.held_out, Utilisation.of(job, mesh.device)
    evaluator = Evaluator(job, trainer, held_out.source, held_out.num_batches) if held_out is not None else None
    history: list[StepMetrics] = []
    stopped_by = 0
    while step < run.num_steps and not stopped_by:
        began = time.perf_counter()
        batch = batches.at(guard.data_progress.batch(step))
        data_seconds = time.perf_counter() - began
        result = trainer.measure(batch)
        bad = guard.judge(step, result)
        if bad is not None:
            metrics_file.write(bad)
            display.note(bad.text())
            step = guard.follow(bad)
            continue
        trainer.update(step)
        rate = learning_rate(training.learning_rate, training.rate_schedule, step, training.steps)
        step += 1
        seconds = synchronised_time(mesh.device) - began
        model_flops, mfu = utilisation.rates(job.global_batch_tokens / seconds)
        num_bytes, basis = allocated_bytes(trainer)
        metrics = StepMetrics(
            step=step,
            loss=result.loss,
            balance_loss=result.routed.balance_loss,
            z_loss=result.routed.z_loss,
            further_loss=result.further_loss,
            tokens=job.global_batch_tokens,
            tokens_per_second=job.global_batch_tokens / seconds,
            model_flops_per_second=model_flops,
            mfu=mfu,
            allocated_bytes=max(num_bytes),
            allocated_basis=basis,
            grad_norm=result.gradient_norm,
            learning_rate=rate,
            step_seconds=seconds,
            data_seconds=data_seconds,
            **routing_keys(result.routed),
        )
        history.append(metrics)
        metrics_file.write(metrics)
        if len(history) == 2:  # the first step with steady-state memory
            metrics_file.write(RankMemory(step, num_bytes, planned_bytes(job) if basis == "peak" else None))
        display.show(metrics)
        last = step == run.num_steps
        if held_out is not None and evaluator is not None and (last or step % held_out.every == 0):
            evaluated = evaluator.evaluate(step, interrupt, keeper.control)
            if evaluated is not None:
                metrics_file.write(evaluated)
                display.show_evaluation(evaluated)
        stopped_by = keeper.poll_interrupt(interrupt)
        keeper.after(step, guard.data_progress, last=last, stopped=stopped_by > 0)
    return Trained(history, stopped_by)


def synchronised_time(device: torch.device) -> float:
    """Wall-clock time in seconds after a device synchronisation."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
