"""`megarun.train`: train a plan from Python. The command line prepares a run with the same function."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megarun.errors import refusal
from megarun.job.job import Job
from megarun.job.run import AUTO, DEFAULT_CHECKPOINTS, NO_VIEWERS, Checkpoints, Run, SavedPlan, Viewers
from megarun.metrics.curves import require_package
from megarun.training.elastic import Plans, choose_plan, read_plans, started_processes
from megarun.training.identity import checkpoints_of, report_options, require_data
from megarun.training.prepare import hold_out, open_held_out, prepare

if TYPE_CHECKING:
    from megaplan.plan.document import PlanDocument
    from megarun.training.loop import Trained

FilePath: TypeAlias = str | os.PathLike[str]
Data: TypeAlias = FilePath | Sequence[FilePath] | Mapping[str, int]
"""A token file, several that are given with weights as `FILE=WEIGHT`, or files with their weights."""
START_TIMEOUT_SECONDS = 60.0
EVAL_EVERY = 100


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Data and interval of evaluation.

    Attributes:
        data: A held-out token file; None: no such file.
        fraction: The part of each training file's rows to hold out instead, a decimal number as text; None: none.
        every: Optimizer steps between two evaluations; there is one after the last step too.
        num_batches: Global batches of an evaluation; None: all that there are.
    """

    data: Path | None = None
    fraction: str | None = None
    every: int = EVAL_EVERY
    num_batches: int | None = None


NO_EVALUATION = Evaluation()


def prepare_run(
    planned: tuple[Job, SavedPlan],
    plans: Plans,
    data: Sequence[str],
    *,
    command: str,
    steps: int | None = None,
    checkpoints: Checkpoints = DEFAULT_CHECKPOINTS,
    evaluation: Evaluation = NO_EVALUATION,
    viewers: Viewers = NO_VIEWERS,
    compiled: bool = False,
    elastic: bool = False,
) -> Run:
    """A run with all its settings, checked before torch is loaded.

    Args:
        planned: The plan's job, and the plan as checkpoints keep it.
        plans: The plans of an elastic job, and the run's folder, new or of a resumed run.
        data: Token files, as `--data` names them.
        command: Command line after `megarun`, for hints.
        steps: Optimizer steps; None: the plan's `training.steps`.
        checkpoints: Settings for saving, and the checkpoint to start from.
        evaluation: Settings of evaluation.
        viewers: Other places of the metrics.
        compiled: torch.compile each block.
        elastic: True if the plan was chosen by the number of processes; some may be spare.

    Raises:
        MegaplanError: The plan has something that megarun does not build, the number of processes is wrong, or the token files do not fit.
    """
    options: dict[str, Any] = {
        "--steps": steps,
        "--seed": planned[0].spec.training.seed,
        "--save-every": checkpoints.save_every,
        "--keep": checkpoints.keep,
        "--checkpoint-url": checkpoints.url,
        "--check-replicas": checkpoints.check_replicas,
        "--compile": compiled,
    }
    if plans.began is not None:
        report_options(plans.began.options, options)
        options = {**options, **plans.began.options}
        steps, compiled = options["--steps"], options["--compile"]
        saving: dict[str, Any] = {"save_every": options["--save-every"], "keep": options["--keep"], "url": options["--checkpoint-url"]}
        checkpoints = replace(checkpoints, check_replicas=options["--check-replicas"], **saving)
        planned = planned[0].with_seed(options["--seed"]), planned[1]
    num_processes = planned[0].spec.mesh.world_size if elastic else started_processes()
    run = prepare(planned, data, plans.out, steps, checkpoints, num_processes=num_processes, command=command)
    if evaluation.fraction is not None:
        if evaluation.data is not None:
            raise refusal("MP628", f"--validation-fraction {evaluation.fraction} and --eval-data {evaluation.data}: one of the two")
        run = hold_out(run, evaluation.fraction, evaluation.every, evaluation.num_batches)
    elif evaluation.data is not None:
        run = replace(run, held_out=open_held_out(evaluation.data, run.job, evaluation.every, evaluation.num_batches))
    for package, wanted in viewers._asdict().items():
        if wanted:
            require_package(package)
    if compiled:
        from megarun.parallel.apply.compile import refuse_compile  # noqa: PLC0415  (loads torch)

        refuse_compile(run.job.spec)
    now = checkpoints_of(run.keeps_in)
    run = replace(run, viewers=viewers, compiled=compiled, plans=plans.texts, options=options, before=now)
    if plans.began is not None:
        require_data(run, plans.began)
        run = replace(run, before=plans.began.before)
        if set(now) - set(run.before):  # saved by this job: the job continues there, even if it was to begin from another one
            run = replace(run, checkpoints=replace(run.checkpoints, resume=AUTO, weights_only=False))
    return run


def train(
    plan: FilePath | PlanDocument,
    data: Data,
    out: FilePath,
    *,
    steps: int | None = None,
    seed: int | None = None,
    save_every: int = 0,
    keep: int = 2,
    resume: FilePath = "auto",
    checkpoint_url: str = "",
    weights_only: bool = False,
    other_data: bool = False,
    memory_copies: bool = False,
    check_replicas: int = 0,
    eval_data: FilePath | None = None,
    validation_fraction: float | str | None = None,
    eval_every: int = EVAL_EVERY,
    eval_batches: int | None = None,
    tensorboard: bool = False,
    wandb: str = "",
    compile: bool = False,
    compile_jobs: int | None = None,
    start_timeout: float = START_TIMEOUT_SECONDS,
    first_step_timeout: float = 1800.0,
    step_timeout: float = 300.0,
) -> Trained:
    """Train a plan, as `megarun train` does. Every process of the job calls it, from its main thread; torchrun starts several.

    Args:
        plan: A plan file, or a plan: `megaplan.split(...).plan`.
        data: A token file; several as `FILE=WEIGHT` texts, or as a mapping from file to integer weight.
        out: A new folder, or the folder of the run to resume; the metrics of every step are in its `metrics.jsonl`.
        steps: Optimizer steps, instead of the plan's `training.steps`.
        seed: Seed of parameters and data, instead of the plan's `training.seed`.
        save_every: Optimizer steps between checkpoints; 0: only when a signal stops the run.
        keep: Checkpoints to leave, the newest; at least 2.
        resume: `auto` (the newest complete checkpoint of `out`), `never`, or a checkpoint's folder.
        checkpoint_url: Storage that keeps the checkpoints instead of `out`, such as `s3://bucket/run`; needs `megaplan[s3]`.
        weights_only: Take parameters alone, and start at step 0.
        other_data: True to resume although `data` differs from the checkpoint's.
        memory_copies: Keep each rank's last states in the memory of two nodes, for restarts by torchrun.
        check_replicas: Steps between two comparisons of the ranks' copies of state; 0: none.
        eval_data: A held-out token file to evaluate on.
        validation_fraction: Evaluate on this part of each file's rows, above 0 and below 1, and train on the rest.
        eval_every: Steps between evaluations.
        eval_batches: Global batches of an evaluation; all that there are.
        tensorboard: Write the metrics for TensorBoard too.
        wandb: Project of Weights & Biases that gets the metrics too.
        compile: True to torch.compile each block; memory then differs from the plan's.
        compile_jobs: Processes that compile the plan's kernels before the first step; None: one a CPU, 0: none.
        start_timeout: Seconds to wait for every process of the job.
        first_step_timeout: Seconds that a rank may take for the first step, for a save and for an evaluation, until the job ends.
        step_timeout: Seconds that a rank may be in one place of a later step.

    Returns:
        Measurements of every step of this start (`history`), and the signal after which all ranks saved and stopped (`stopped_by`), else 0.

    Raises:
        MegaplanError: The plan, the processes, the token files or `out` cannot be used, ranks do not train the same, or steps stay bad.

    Examples:
        >>> import megaplan, megarun
        >>> plan = megaplan.split("plans/tiny-hybrid.yaml", batch__seq_length=64).plan
        >>> trained = megarun.train(plan, "corpus.tokens", "runs/api", steps=2)
        >>> [metrics.step for metrics in trained.history], trained.stopped_by
        ([1, 2], 0)
    """
    inputs = _inputs(plan, data, seed, out)
    saving = Checkpoints(save_every, keep, os.fspath(resume), weights_only, other_data, checkpoint_url, memory_copies, check_replicas)
    run = prepare_run(
        *inputs,
        command=" ".join(["train", "PLAN", *(f"--data {word}" for word in inputs[2]), f"--out {os.fspath(out)}"]),
        steps=steps,
        checkpoints=saving,
        evaluation=_evaluation(eval_data, validation_fraction, eval_every, eval_batches),
        viewers=Viewers(tensorboard, wandb),
        compiled=compile,
    )
    return _trained(run, compile_jobs, start_timeout, first_step_timeout, step_timeout)


def _evaluation(data: FilePath | None, fraction: float | str | None, every: int, num_batches: int | None) -> Evaluation:
    return Evaluation(None if data is None else Path(data), None if fraction is None else str(fraction), every, num_batches)


def _trained(run: Run, compile_jobs: int | None, start_timeout: float, first_step_timeout: float, step_timeout: float) -> Trained:
    from megarun.launch.process_group import read_launch  # noqa: PLC0415  (torch takes seconds to load)
    from megarun.launch.progress import Timeouts  # noqa: PLC0415
    from megarun.training.loop import start_kernels  # noqa: PLC0415
    from megarun.training.loop import train as train_run  # noqa: PLC0415

    kernels = start_kernels(run.job, compile_jobs)  # forks, before there are threads
    launch = read_launch(start_timeout, run.job.spec.mesh, elastic=run.checkpoints.memory_copies)
    return train_run(run, launch, Timeouts(first_step_timeout, step_timeout), kernels)


def _inputs(plan: FilePath | PlanDocument, data: Data, seed: int | None, out: FilePath) -> tuple[tuple[Job, SavedPlan], Plans, list[str]]:
    plans = read_plans(plan, None, seed, out)
    return choose_plan(plans, None, started_processes()), plans, _words(data)


def _words(data: Data) -> list[str]:
    if isinstance(data, (str, os.PathLike)):
        return [os.fspath(data)]
    if isinstance(data, Mapping):
        return [f"{os.fspath(path)}={weight}" for path, weight in data.items()]
    return [os.fspath(path) for path in data]
