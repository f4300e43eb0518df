"""`megarun`: train a plan, trace its memory, prepare data, look at checkpoints. The one place where an exception becomes an exit status.

Exit status: 0 done, 1 a trace is past tolerance, 2 an error, 130 interrupted. Under torchrun the rank that failed first prints its error
and the others are silent.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megaplan.terminal.exit_status import ERROR, INTERRUPTED, SIGNAL_STATUS
from megaplan.terminal.run import exit_status_of

app = typer.Typer(
    name="megarun",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root() -> None:
    """Train exactly what a megaplan plan says, on one process or under torchrun."""


@app.command()
def train(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `megaplan split` writes it.")],
    *,
    data: Annotated[list[str], typer.Option("--data", metavar="FILE[=WEIGHT]", help="A token file; several are mixed by weight.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for metrics.jsonl.")],
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps, instead of the plan's training.steps.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of parameters and data, instead of the plan's training.seed.")] = None,
    save_every: Annotated[int, typer.Option("--save-every", min=0, metavar="N", help="Save after every N steps and at the end.")] = 0,
    keep: Annotated[int, typer.Option("--keep", min=2, help="Checkpoints to leave, the newest.")] = 2,
    resume: Annotated[str, typer.Option("--resume", metavar="auto|never|DIR", help="auto: DIR's newest whole checkpoint.")] = "auto",
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Take parameters alone, and start at step 0.")] = False,
    other_data: Annotated[bool, typer.Option("--other-data", help="Resume although --data is not what the checkpoint names.")] = False,
    eval_data: Annotated[Path | None, typer.Option("--eval-data", metavar="FILE", help="A held-out token file to evaluate on.")] = None,
    validation_fraction: Annotated[
        str | None, typer.Option("--validation-fraction", metavar="F", help="Evaluate on this part of each file, and train on the rest.")
    ] = None,
    eval_every: Annotated[int, typer.Option("--eval-every", min=1, metavar="N", help="Steps between evaluations; and at the end.")] = 100,
    eval_batches: Annotated[int | None, typer.Option("--eval-batches", min=1, help="Of an evaluation; all that there are.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write the metrics for TensorBoard too.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile each block; memory is then not the plan's.")] = False,
    start_timeout: Annotated[float, typer.Option("--start-timeout", min=1, metavar="S", help="Seconds to wait for every process.")] = 60,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Show Python's own account of a failure too.")] = False,
) -> int:
    """Train PLAN on FILE.

    One process trains a plan of one rank; for more, start it with

        torchrun --standalone --nproc-per-node N -m megarun train PLAN --data FILE --out DIR

    SIGTERM and SIGINT save and stop all ranks after the same step (exit 143 and 130); the same command resumes, under this plan or another
    one of the same model.
    """
    # Torch takes seconds to load: what is wrong with the words, the plan or the data is said before.
    from megarun.api import Evaluation, prepare_run  # noqa: PLC0415
    from megarun.job.run import Checkpoints, read_job  # noqa: PLC0415
    from megarun.launch.failure import exit_on_peer_failure, report_failure  # noqa: PLC0415

    launch = job = None
    try:
        planned = read_job(plan, seed)
        job = planned[0]
        prepared = prepare_run(
            planned,
            data,
            out,
            command=shlex.join(["train", plan, *(word for given in data for word in ("--data", given)), "--out", str(out)]),
            steps=steps,
            checkpoints=Checkpoints(save_every, keep, resume, weights_only, other_data),
            evaluation=Evaluation(eval_data, validation_fraction, eval_every, eval_batches),
            tensorboard=tensorboard,
            compiled=compiled,
        )
        from megarun.launch.process_group import read_launch  # noqa: PLC0415
        from megarun.metrics.display import print_summary  # noqa: PLC0415
        from megarun.metrics.file import FILE_NAME  # noqa: PLC0415
        from megarun.training.loop import train as train_job  # noqa: PLC0415

        launch = read_launch(start_timeout, job.spec.mesh)
        exit_on_peer_failure(launch)
        trained = train_job(prepared, launch)
        if launch.rank == 0 and trained.history:
            print_summary(job.spec.name, trained.history, str(out / FILE_NAME))
    except Exception as error:  # the last resort: no user sees a traceback unasked
        report_failure(error, launch, job.spec.mesh if job else None, with_traceback=with_traceback)
        return ERROR
    return SIGNAL_STATUS + trained.stopped_by if trained.stopped_by else 0


@app.command()
def trace(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `megaplan split` writes it.")],
    *,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Only this rank.")] = None,
    stage: Annotated[int | None, typer.Option("--stage", metavar="S", help="Only the distinct ranks of this stage.")] = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="Rows of difference to show on each rank.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Show Python's own account of a failure too.")] = False,
) -> int:
    """Compare PLAN's estimate with the bytes the runtime itself allocates, rank by rank.

    Runs the real modules, schedule and optimizers for two steps on tensors without values: no GPU, no other process. Without --rank or
    --stage, one rank of each group that the estimate calls alike. Exits 1 if a number is past tolerance.
    """
    from megarun.trace.command import trace_plan  # noqa: PLC0415  (a help text needs no model)

    try:
        return trace_plan(plan, rank=rank, stage=stage, as_json=as_json, top=top)
    except Exception as error:
        if as_json:
            from megaplan.terminal import output  # noqa: PLC0415
            from megarun.launch.failure import diagnostics_of  # noqa: PLC0415

            output.fail(diagnostics_of(error), as_json=True)
        else:
            from megarun.launch.failure import report_failure  # noqa: PLC0415

            report_failure(error, with_traceback=with_traceback)
        return ERROR


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; the process's own if None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def command() -> object:
        _mount_groups(words)
        return app(words, prog_name="megarun", standalone_mode=False)

    return exit_status_of(command, lambda error: _failed(error, words))


def _mount_groups(words: Sequence[str]) -> None:
    """Add `megarun data` and `megarun checkpoint`, unless the command is another one: training needs no tokenizer."""
    if words[:1] not in (["train"], ["trace"]) and not app.registered_groups:
        from megarun.cli import checkpoint, data  # noqa: PLC0415

        app.add_typer(data.app, name="data")
        app.add_typer(checkpoint.app, name="checkpoint")


def _failed(error: Exception, words: Sequence[str]) -> int:
    """Usage errors of the argument parser, an abort, and bugs."""
    from megaplan.diagnostics import diagnostic  # noqa: PLC0415
    from megaplan.terminal import output  # noqa: PLC0415  (only when something is wrong)

    if type(error).__name__ == "Abort":
        return INTERRUPTED
    message = getattr(error, "format_message", None)
    if callable(message):
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "megarun"
        output.fail([diagnostic("MP480", message().rstrip(), hints=(f"{command} --help",))], as_json=output.wants_json(words))
    else:
        from megarun.launch.failure import report_failure  # noqa: PLC0415

        report_failure(error)
    return ERROR
