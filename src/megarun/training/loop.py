"""The training loop; start reading megarun here.

run     = settings of the plan and the command line: spec, inventory, layout, tokens, folder, steps
mesh    = this process's coordinates: (pp, dp_replicate, dp_shard, cp, tp)
trainer = this rank's stages, sharded and initialised, with their schedule and optimizers
batches = this rank's rows of each step
keeper  = checkpoints: the one to start from, and when to save
evaluator = the loss of held-out tokens, at intervals
guard   = bad steps: the batch of each step, and whether its update is applied
watch   = ends the job if a rank is stuck, and names it
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaplan.spec.step_graphs import why_eager
from megaplan.terminal.streams import unfailing_stderr
from megarun.checkpoint.keeper import Keeper
from megarun.data.batches import Batches
from megarun.data.identity import TOKENIZER
from megarun.data.progress import DataProgress
from megarun.engine.trainer import Trainer, sharded_stages
from megarun.job.job import Job
from megarun.job.run import Run
from megarun.kernels.libraries import library_notes
from megarun.launch.allocator import differs_from_plan, set_allocator
from megarun.launch.interrupt import Interrupt
from megarun.launch.process_group import CONNECT_FACTOR, Launch, choose_device, device_text, process_group
from megarun.launch.progress import CONNECTING, Progress, Timeouts
from megarun.launch.session import release_spares, wait_as_spare
from megarun.launch.watch import Watch
from megarun.metrics.curves import Curves, TensorBoard, WeightsAndBiases
from megarun.metrics.display import Display
from megarun.metrics.file import MetricsFile
from megarun.metrics.memory import allocated_bytes, planned_bytes
from megarun.metrics.rank_times import StepTimes, WaitSampler
from megarun.metrics.records import RankMemory, RankTimes, StepMetrics, routing_keys
from megarun.metrics.utilisation import Utilisation
from megarun.optim.rates import learning_rate
from megarun.parallel.groups.mesh import RankMesh, build_mesh
from megarun.training.agreement import require_agreement, require_one_folder
from megarun.training.bad_steps import StepGuard
from megarun.training.evaluation import Evaluator
from megarun.training.folder import JOB, MESSAGES, PLAN, RunFolder
from megarun.training.identity import beginning_of, keep_on_node, tokenizer_of
from megarun.training.replicas import ReplicaChecks

if TYPE_CHECKING:
    from megarun.kernels.ahead import KernelsAhead

TIMEOUT_MARGIN_SECONDS = 60.0
COMPILED = "--compile: a compiler that compiles again cannot be recorded"
"""Reason for which steps of a plan with CUDA graphs are eager."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a run.

    Attributes:
        history: Metrics of every step since this start.
        stopped_by: Signal number that ended the run before its last step; 0 if none.
    """

    history: list[StepMetrics]
    stopped_by: int


def start_kernels(job: Job, num_processes: int | None) -> KernelsAhead | None:
    """The compiler of the job's kernels; None where it launches none. Call it before the process starts CUDA or threads.

    Args:
        job: Job to train.
        num_processes: Processes that compile; None for one a CPU, 0 to compile each kernel when it is first launched.
    """
    if num_processes == 0 or not job.spec.host.uses_triton or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return None
    from megarun.kernels.ahead import KernelsAhead  # noqa: PLC0415  (needs triton, which is optional)

    return KernelsAhead(job, num_processes)


def train(run: Run, launch: Launch, timeouts: Timeouts | None = None, kernels: KernelsAhead | None = None) -> Trained:
    """Train the run's job; every process of the job calls it.

    Args:
        run: The run.
        launch: Launch of this rank.
        timeouts: Time limits of a rank in one place of a step.
        kernels: Result of `start_kernels`.

    Raises:
        MegaplanError: A device is missing, the ranks' settings or folders differ, another job uses the folder, it already has a run,
            torch's schedule differs from the plan's, or too many steps are bad.
    """
    started, num_ranks = launch, run.job.spec.mesh.world_size
    if started.rank >= num_ranks:
        if kernels is not None:
            kernels.close()
        wait_as_spare(started.store)
        return Trained([], 0)
    launch = replace(started, world_size=num_ranks)
    planned = run.job.spec.host.expands_segments
    setting = set_allocator(planned)  # before CUDA starts
    device = choose_device(launch)
    require_agreement(run, launch, device_text(device))
    with ExitStack() as stack:
        messages = stack.enter_context(unfailing_stderr())
        if kernels is not None:
            stack.callback(kernels.close)
            kernels.begin(device, launch.rank)
        folder = stack.enter_context(RunFolder(run.out)) if launch.rank == 0 else None
        if launch.rank == 0:
            messages.keep_in(run.out / MESSAGES)
        require_one_folder(run, launch, folder.holder.token if folder is not None else "")
        interrupt = stack.enter_context(Interrupt())
        progress = Progress(timeouts, CONNECT_FACTOR * launch.start_timeout)
        stack.enter_context(Watch(launch, run.job.spec.mesh, progress, interrupt))
        progress.enter(CONNECTING)
        # the watch ends a stuck job and knows which rank is stuck; torch's own timeout comes after it
        stack.enter_context(process_group(launch, device, 2 * progress.limit + TIMEOUT_MARGIN_SECONDS))
        mesh = build_mesh(run.job.spec.mesh, device)
        keeper = Keeper(run, folder.require if folder is not None else None)
        stack.push(keeper.settle)
        progress.enter("starting")
        keeper.find()
        resumed = keeper.continues or launch.restarted
        metrics_file = stack.enter_context(MetricsFile(run.out, mesh.rank, resumed=resumed, curves=_curves(run)))
        if folder is not None:
            folder.keep(PLAN, run.plan.text)
            folder.keep(JOB, beginning_of(run, folder.holder.token).text())
            if (tokenizer := tokenizer_of(run)) is not None:
                folder.keep(TOKENIZER, tokenizer)
        elif run.checkpoints.url or started.world_size > num_ranks:
            keep_on_node(run)
        display = stack.enter_context(Display(run.num_steps, mesh.rank))
        if device.type == "cuda":
            display.note(f"allocator: {setting.text}")
            display.note(differs_from_plan(setting, planned))
            for text in _notes_of_steps(run, device):
                display.note(text)
        sampler = stack.enter_context(WaitSampler(progress)) if launch.world_size > 1 and device.type == "cpu" else None
        times = StepTimes(run.job.spec.mesh, mesh.rank, keeper.control, sampler)
        ready = partial(_await_kernels, kernels, launch, interrupt, display, progress)
        trained = train_steps(run, mesh, keeper, interrupt, metrics_file, display, progress, times, ready)
    if launch.rank == 0 and started.world_size > num_ranks:
        release_spares(started.store)
    return trained


def _curves(run: Run) -> list[Callable[[Path], Curves]]:
    """Writers of the metrics' curves that the command asks for."""
    made: list[Callable[[Path], Curves]] = [TensorBoard] if run.viewers.tensorboard else []
    if run.viewers.wandb:
        digests = {"plan_digest": run.plan.plan_digest, "model_digest": run.plan.model_digest}
        spec = run.job.spec.model_dump(mode="json", exclude_defaults=True)
        made.append(partial(WeightsAndBiases, project=run.viewers.wandb, config={**digests, **spec}))
    return made


def _notes_of_steps(run: Run, device: torch.device) -> Iterator[str]:
    """Lines of the log on the packages of kernels that run, and on why steps stay eager."""
    for note in library_notes(run.job.spec, run.job.inventory, torch.cuda.get_device_capability(device)):
        yield note.text
    reason = why_eager(run.job.spec) or (COMPILED if run.compiled else None)
    if reason is not None:
        yield f"CUDA graphs: none, so steps are eager; {reason}"


def train_steps(
    run: Run,
    mesh: RankMesh,
    keeper: Keeper,
    interrupt: Interrupt,
    metrics_file: MetricsFile,
    display: Display,
    progress: Progress | None = None,
    times: StepTimes | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Trained:
    """Build the trainer, call `ready`, then step: read, train, measure, write, save."""
    job, training, progress = run.job, run.job.spec.training, progress or Progress()
    times = times or StepTimes(job.spec.mesh, mesh.rank, keeper.control, None)
    trainer = Trainer(job, mesh, sharded_stages(job, mesh, compiled=run.compiled))
    batches = Batches(run.source, job.spec, mesh)
    guard = StepGuard(training.bad_steps, keeper, trainer)
    step = guard.start()
    held_out, utilisation = run.held_out, Utilisation.of(job, mesh.device)
    evaluator = Evaluator(job, trainer, held_out.source, held_out.num_batches) if held_out is not None else None
    history: list[StepMetrics] = []
    stopped_by = 0
    checks = ReplicaChecks(run.checkpoints.check_replicas, keeper, trainer, job)
    ready()
    while step < run.num_steps and not stopped_by:
        began = times.begin()
        progress.enter("reading a batch", step + 1)
        batch = batches.at(guard.data_progress.batch(step))
        data_seconds = time.perf_counter() - began
        progress.enter("computing")
        result = trainer.measure(batch)
        progress.enter("updating")
        bad = guard.judge(step, result)
        if bad is not None:
            metrics_file.write(bad)
            display.note(bad.text())
            step = guard.follow(bad)
            continue
        keeper.await_copies()
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
        _report(times.add(step, seconds, data_seconds), metrics_file, display, trainer.take_note())
        display.show(metrics)
        last = step == run.num_steps
        if held_out is not None and evaluator is not None and (last or step % held_out.every == 0):
            progress.enter("evaluating")
            if (evaluated := evaluator.evaluate(step, interrupt, keeper.control)) is not None:
                metrics_file.write(evaluated)
                display.show_evaluation(evaluated)
        stopped_by = _between_steps(step, guard.data_progress, keeper, checks, interrupt, progress, last=last)
    return Trained(history, stopped_by)


def _between_steps(
    step: int, data_progress: DataProgress, keeper: Keeper, checks: ReplicaChecks, interrupt: Interrupt, progress: Progress, *, last: bool
) -> int:
    """Agree on signals, compare replicas and save, when each is due; returns the signal that ends the run, 0 if none."""
    progress.enter("agreeing on signals")
    stopped_by = keeper.poll_interrupt(interrupt)
    progress.enter("comparing replicas")
    checks.after(step, saves=keeper.saves(step, last=last, stopped=stopped_by > 0))
    progress.enter("saving")
    keeper.after(step, data_progress, last=last, stopped=stopped_by > 0)
    return stopped_by


def _await_kernels(kernels: KernelsAhead | None, launch: Launch, interrupt: Interrupt, display: Display, progress: Progress) -> None:
    if kernels is None or not kernels.is_wanted:
        return
    progress.enter("compiling kernels")
    outcome = kernels.finish(launch.store, launch.rank, lambda: interrupt.received > 0, display.show_kernels)
    if launch.rank == 0 or (outcome.error and launch.local_rank == 0):
        display.note(outcome.text, anywhere=bool(outcome.error))


def _report(compared: RankTimes | None, metrics_file: MetricsFile, display: Display, note: str | None) -> None:
    display.note(note)
    if compared is not None:
        metrics_file.write(compared)
        display.note(compared.note)


def synchronised_time(device: torch.device) -> float:
    """Wall-clock time in seconds after a device synchronisation."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
