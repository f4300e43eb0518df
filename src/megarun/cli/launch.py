"""`megarun launch`: job scripts for schedulers. Exit status: 0 written, 2 an error. Nothing is submitted."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from megaplan.errors import MegaplanError
from megaplan.plan.read import read_plan
from megaplan.terminal import output
from megaplan.terminal.exit_status import ERROR
from megarun.cli.examples import epilog
from megarun.errors import refusal
from megarun.launch.scripts import JobShape, kubernetes_documents, slurm_script

app: typer.Typer = typer.Typer(name="launch", help="Write a job script for a scheduler.", no_args_is_help=True)

Plan = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, as `megaplan split` writes it.")]
Train = Annotated[list[str], typer.Argument(metavar="-- OPTION…", help="Options of `megarun train`: --data FILE --out DIR …")]


@app.command("slurm", epilog=epilog("launch slurm"))
def slurm_command(
    plan: Plan,
    train: Train,
    *,
    time: Annotated[str | None, typer.Option(metavar="HH:MM:SS", help="Time limit; the run saves before it and is queued again.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
) -> int:
    """Print a batch script for `sbatch`: one task a rank; SIGUSR1 before the time limit saves, and the job is queued again.

    megarun launch slurm plan.json --time 24:00:00 -- --data corpus.tokens --out /shared/runs/my --save-every 100 > job.sh
    """
    given = {"time": time, "partition": partition, "account": account}
    directives = {name: value for name, value in given.items() if value is not None}
    return _answered(lambda: output.write(slurm_script(_shape(plan), ["train", plan, *_checked(train)], directives)))


@app.command("kubernetes", epilog=epilog("launch kubernetes"))
def kubernetes_command(
    plan: Plan,
    train: Train,
    *,
    image: Annotated[str, typer.Option(help="Container image that has megarun.")],
    volume: Annotated[list[str] | None, typer.Option(metavar="CLAIM=PATH", help="A persistent volume claim and its mount path.")] = None,
) -> int:
    """Print manifests for `kubectl apply`: an indexed Job with one pod a node, and a policy that admits its own pods alone.

    megarun launch kubernetes /data/plan.json --image IMAGE --volume data=/data -- --data /data/corpus.tokens --out /data/my
    """

    def write() -> None:
        import yaml  # noqa: PLC0415

        mounts = {}
        for each in volume or []:
            claim, equals, path = each.partition("=")
            if not (claim and equals and path.startswith("/")):
                raise refusal("MP662", f"--volume {each}: not CLAIM=/PATH", "--volume")
            mounts[path] = claim
        documents = kubernetes_documents(_shape(plan), ["train", plan, *_checked(train)], image, mounts)
        output.write(yaml.safe_dump_all(documents, sort_keys=False))

    return _answered(write)


def _shape(plan: str) -> JobShape:
    spec = read_plan(plan).spec
    return JobShape.of(spec.name, spec.mesh.world_size, spec.device.per_node)


def _checked(train: Sequence[str]) -> Sequence[str]:
    """The options of `megarun train`, including the ones that a queued job requires.

    Raises:
        MegaplanError: MP662.
    """
    named = {word.partition("=")[0] for word in train}
    missing = [name for name in ("--data", "--out") if name not in named]
    if missing:
        raise refusal("MP662", f"after --: {' and '.join(missing)} missing", hints=("… -- --data FILE --out DIR --save-every 100",))
    return train


def _answered(action: Callable[[], None]) -> int:
    try:
        action()
    except MegaplanError as error:
        output.fail(error.diagnostics, as_json=False)
        return ERROR
    return 0
