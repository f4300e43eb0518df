"""`megaplan import torchtitan`: a job configuration of torchtitan as a spec file."""

from typing import Annotated

import typer

from megaplan.cli.files import STDOUT, write_spec
from megaplan.cli.options import Overrides


def import_torchtitan(
    job: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE [-- ARGS]",
            help="TOML of a job, JSON of its sections, config_registry.py, YAML of Primus, or a launch script; - for stdin. "
            "Then torchtitan's own arguments, or those of the script.",
        ),
    ],
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of the job, needed if a degree is -1.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME/FLAVOR", help="Of torchtitan's registry: llama3/8B.")] = None,
    function: Annotated[
        str | None, typer.Option("--config", metavar="FUNCTION", help="Configuration in a Python file, such as llama3_8b.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="KEY", help="Leave out a key of the file; repeatable.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse every key that the importer does not know.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Convert a torchtitan job to a spec. Keys that decide a tensor and that a spec cannot express are errors."""
    from megaplan.importers.structure import Policy  # noqa: PLC0415  (help needs no model)
    from megaplan.importers.torchtitan.launches import read_job  # noqa: PLC0415
    from megaplan.importers.torchtitan.spec import import_torchtitan as imported_job  # noqa: PLC0415

    found = read_job(job[0], job[1:])
    policy = Policy(strict=strict, ignored=frozenset(ignore or ()))
    imported = imported_job(
        found.text, found.name, overrides or (), gpus or found.gpus, model, function or found.function, policy, found.launch
    )
    write_spec(target, imported, f"Imported from {found.name}, a job of torchtitan.", force=force)
    return 0
