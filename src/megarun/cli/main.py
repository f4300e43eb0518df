"""`megarun`: train a plan, trace its memory, compile its kernels, look at a machine, prepare data, manage checkpoints, write job scripts.

This module alone turns an exception into an exit status.

Exit status: 0 done, 1 a trace exceeds its tolerance, a kernel does not compile, or the doctor finds a problem, 2 an error, 130
interrupted. Under torchrun only the rank that failed first prints its error.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.terminal.exit_status import ERROR, INTERRUPTED, SIGNAL_STATUS
from megaplan.terminal.output import write
from megaplan.terminal.run import exit_status_of
from megarun.cli.examples import FILES, MACHINE, TRAIN, epilog

if TYPE_CHECKING:
    from megarun.training.loop import Trained

app = typer.Typer(
    name="megarun",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from megaplan import __version__  # noqa: PLC0415
        from megaplan.terminal.versions import version_text  # noqa: PLC0415

        write(version_text("megarun", __version__, ("torch", "triton", "numpy", "pydantic")))
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Train a megaplan plan exactly, in one process or under torchrun."""


@app.command(epilog=epilog("train"), rich_help_panel=TRAIN)
def train(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `megaplan split` writes it.")],
    *,
    data: Annotated[list[str], typer.Option("--data", metavar="FILE[=WEIGHT]", help="A token file; several are mixed by weight.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="A new folder for metrics.jsonl.")],
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps; default: training.steps of the plan.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of parameters and data; default: the plan's.")] = None,
    save_every: Annotated[int, typer.Option("--save-every", min=0, metavar="N", help="Save after every N steps and at the end.")] = 0,
    keep: Annotated[int, typer.Option("--keep", min=2, help="Number of newest checkpoints to keep.")] = 2,
    resume: Annotated[str, typer.Option("--resume", metavar="auto|never|DIR", help="auto: newest complete checkpoint.")] = "auto",
    plans: Annotated[
        Path | None,
        typer.Option("--plans", metavar="DIR", help="More plans of the run; the largest that there are processes for is taken."),
    ] = None,
    checkpoint_url: Annotated[str, typer.Option("--checkpoint-url", metavar="URL", help="Storage of checkpoints, s3://BUCKET/RUN.")] = "",
    memory_copies: Annotated[bool, typer.Option("--memory-copies", help="Copy each rank's states to the memory of two nodes.")] = False,
    check_replicas: Annotated[int, typer.Option(min=0, metavar="N", help="Compare the ranks' copies of state every N steps.")] = 0,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Load only parameters, and start at step 0.")] = False,
    other_data: Annotated[bool, typer.Option("--other-data", help="Resume with other data than the checkpoint's.")] = False,
    eval_data: Annotated[Path | None, typer.Option("--eval-data", metavar="FILE", help="A held-out token file to evaluate on.")] = None,
    validation_fraction: Annotated[
        str | None, typer.Option("--validation-fraction", metavar="F", help="Hold out this share of each file for evaluation.")
    ] = None,
    eval_every: Annotated[int, typer.Option("--eval-every", min=1, metavar="N", help="Steps between evaluations.")] = 100,
    eval_batches: Annotated[int | None, typer.Option("--eval-batches", min=1, help="Batches per evaluation; default: all.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write the metrics for TensorBoard.")] = False,
    wandb: Annotated[str, typer.Option("--wandb", metavar="PROJECT", help="Also send the metrics to Weights & Biases.")] = "",
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile each block; the memory then differs from the plan.")] = False,
    compile_jobs: Annotated[int | None, typer.Option(min=0, metavar="N", help="Processes that compile kernels; 0: none.")] = None,
    start_timeout: Annotated[float, typer.Option("--start-timeout", min=1, metavar="S", help="Seconds to wait for every process.")] = 60,
    first_step_timeout: Annotated[float, typer.Option(min=1, metavar="S", help="Seconds for the first step, a save or evaluation.")] = 1800,
    step_timeout: Annotated[float, typer.Option(min=1, metavar="S", help="Seconds in one place of a step until the job ends.")] = 300,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Also print Python's traceback of an error.")] = False,
) -> int:
    """Train PLAN on FILE.

    One process trains a plan with one rank; for more ranks use

        torchrun --standalone --nproc-per-node N -m megarun train PLAN --data FILE --out DIR

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP save and stop all ranks after the same step (exit 128 + number: 143, 130, 138, 129); the same
    command resumes, with this plan or another plan of the same model. With --plans and torchrun's --nnodes MIN:MAX --max-restarts N a job
    that loses a node continues with the plan for the remaining ones.
    """
    # Torch takes seconds to load: errors in the arguments, the plan or the data are reported first.
    from megarun.api import Evaluation, prepare_run  # noqa: PLC0415
    from megarun.job.run import Checkpoints, Viewers  # noqa: PLC0415
    from megarun.launch.failure import exit_on_peer_failure, report_failure  # noqa: PLC0415
    from megarun.training.elastic import choose_plan, read_plans, started_processes  # noqa: PLC0415

    launch = job = None
    try:
        candidates = read_plans(plan, plans, seed, out)
        planned = (job, _) = choose_plan(candidates, plans, started_processes())
        prepared = prepare_run(
            planned,
            candidates,
            data,
            command=shlex.join(["train", plan, *(word for given in data for word in ("--data", given)), "--out", out]),
            steps=steps,
            checkpoints=Checkpoints(save_every, keep, resume, weights_only, other_data, checkpoint_url, memory_copies, check_replicas),
            evaluation=Evaluation(eval_data, validation_fraction, eval_every, eval_batches),
            viewers=Viewers(tensorboard, wandb),
            compiled=compiled,
            elastic=plans is not None,
        )
        from megarun.launch.process_group import read_launch  # noqa: PLC0415
        from megarun.launch.progress import Timeouts  # noqa: PLC0415
        from megarun.training import loop  # noqa: PLC0415

        kernels = loop.start_kernels(job, compile_jobs)  # forks, before there are threads
        launch = read_launch(start_timeout, job.spec.mesh, elastic=plans is not None or memory_copies)
        exit_on_peer_failure(launch)
        trained = loop.train(prepared, launch, Timeouts(first_step_timeout, step_timeout), kernels)
        if launch.rank == 0:
            _summarise(job.spec.name, trained, candidates.out)
    except Exception as error:  # last resort: no user sees a traceback without asking for it
        report_failure(error, launch, job.spec.mesh if job else None, with_traceback=with_traceback)
        return ERROR
    return SIGNAL_STATUS + trained.stopped_by if trained.stopped_by else 0


def _summarise(name: str, trained: Trained, out: Path) -> None:
    """Print the table of a run that has trained a step."""
    from megarun.metrics.display import print_summary  # noqa: PLC0415  (help needs none)
    from megarun.metrics.file import FILE_NAME  # noqa: PLC0415

    if trained.history:
        print_summary(name, trained.history, str(out / FILE_NAME))


@app.command(epilog=epilog("trace"), rich_help_panel=MACHINE)
def trace(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `megaplan split` writes it.")],
    *,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Trace only this rank.")] = None,
    stage: Annotated[int | None, typer.Option("--stage", metavar="S", help="Trace only the distinct ranks of this stage.")] = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="Rows of difference to show per rank.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Also print Python's traceback of an error.")] = False,
) -> int:
    """Compare PLAN's estimate with the bytes that the runtime allocates, for each rank.

    Runs the real modules, schedule and optimizers for two steps on fake tensors, without a GPU or other processes. By default it traces one
    rank of each group with equal estimates. Exits 1 if a number exceeds its tolerance.
    """
    from megarun.trace.command import trace_plan  # noqa: PLC0415  (help needs no model)

    return _answered(lambda: trace_plan(plan, rank=rank, stage=stage, as_json=as_json, top=top), as_json, with_traceback)


@app.command("compile", epilog=epilog("compile"), rich_help_panel=MACHINE)
def compile_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `megaplan split` writes it.")],
    *,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="Device to compile for; default: the plan's.")] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Folder of compiled kernels; default: Triton's own, $TRITON_CACHE_DIR.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Processes that compile; default: one a CPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Also print Python's traceback of an error.")] = False,
) -> int:
    """Compile the Triton kernels that PLAN launches, without a GPU, into a cache that a job can take along.

    Runs a step of one rank of each group with equal estimates on fake tensors. A job finds the kernels with TRITON_CACHE_DIR=DIR if it has
    the same Triton, minor version of Python, ptxas and megakernels. Exits 1 if a kernel does not compile.
    """
    from megarun.kernels.command import compile_plan  # noqa: PLC0415  (help needs no model)

    return _answered(lambda: compile_plan(plan, device=device, cache=cache, jobs=jobs, as_json=as_json), as_json, with_traceback)


@app.command(epilog=epilog("sample"), rich_help_panel=FILES)
def sample(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL of a run or of one checkpoint.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt.")],
    *,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json, or a token file made with it; default: the run's.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="Most tokens to write.")] = 100,
    temperature: Annotated[float, typer.Option("--temperature", min=0, metavar="T", help="0: always the most probable token.")] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", min=1e-9, max=1, metavar="P", help="Draw from the fewest tokens of this sum.")] = 0.95,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the choices.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Also print Python's traceback of an error.")] = False,
) -> int:
    """Continue TEXT with the newest checkpoint of RUN, of any layout, in one process.

    Keys, values and states of earlier tokens are kept, so that a token costs a forward of one position.
    """
    from megarun.cli.sample import Wanted, write_sample  # noqa: PLC0415  (help needs no model)

    wanted = Wanted(text, tokens, temperature, top_p, seed)
    return _answered(lambda: write_sample(run, tokenizer, wanted, as_json=as_json), as_json, with_traceback)


@app.command(name="eval", epilog=epilog("eval"), rich_help_panel=FILES)
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL of a run or of one checkpoint.")],
    data: Annotated[Path, typer.Argument(metavar="FILE", help="A token file.")],
    *,
    rows: Annotated[int | None, typer.Option("--rows", min=1, metavar="N", help="Most rows to read; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Also print Python's traceback of an error.")] = False,
) -> int:
    """Compute loss, perplexity and bits per byte of FILE under the newest checkpoint of RUN, of any layout, in one process."""
    from megarun.cli.eval import write_evaluation  # noqa: PLC0415  (help needs no model)

    return _answered(lambda: write_evaluation(run, data, rows, as_json=as_json), as_json, with_traceback)


@app.command(epilog=epilog("doctor"), rich_help_panel=MACHINE)
def doctor(
    plan: Annotated[str | None, typer.Argument(metavar="[PLAN]", help="A plan file; also checks its requirements.")] = None,
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The folder that a run would write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Also print Python's traceback of an error.")] = False,
) -> int:
    """Report what this machine has and lacks for training: versions, devices, memory, known hazards, and for PLAN its compiled kernels.

    Exits 1 if something would keep a run from starting or make it wrong.
    """
    from megarun.doctor.command import examine  # noqa: PLC0415

    return _answered(lambda: examine(plan, out=out, as_json=as_json), as_json, with_traceback)


def _answered(answer: Callable[[], int], as_json: bool, with_traceback: bool) -> int:
    """The status of a command that answers in text or JSON; and of its errors."""
    try:
        return answer()
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
        arguments: Command-line words without the program name; `sys.argv[1:]` if None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def command() -> object:
        _mount_groups(words)
        return app(words, prog_name="megarun", standalone_mode=False)

    return exit_status_of(command, lambda error: _failed(error, words))


def _mount_groups(words: Sequence[str]) -> None:
    """Add `megarun data`, `megarun checkpoint` and `megarun launch`, unless another command is given: training needs no tokenizer."""
    if words[:1] not in (["train"], ["trace"], ["compile"], ["doctor"]) and not app.registered_groups:
        from megarun.cli import checkpoint, data, launch  # noqa: PLC0415

        app.add_typer(data.app, name="data", rich_help_panel=FILES)
        app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=FILES)
        app.add_typer(launch.app, name="launch", rich_help_panel=TRAIN)


def _failed(error: Exception, words: Sequence[str]) -> int:
    """Usage errors of the argument parser, an abort, and bugs."""
    from megaplan.terminal import output  # noqa: PLC0415  (only when something is wrong)
    from megaplan.terminal.usage import usage_error  # noqa: PLC0415

    if type(error).__name__ == "Abort":
        return INTERRUPTED
    usage = usage_error(error, "megarun")
    if usage is not None:
        output.fail([usage], as_json=output.asks_json(words))
    else:
        from megarun.launch.failure import report_failure  # noqa: PLC0415

        report_failure(error)
    return ERROR
