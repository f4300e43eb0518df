"""`megaplan import megatron`: launch arguments of Megatron-LM as a spec file."""

from __future__ import annotations

from typing import Annotated

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import Overrides
from megaplan.terminal import output


def import_megatron(
    launch: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE [-- ARGS]",
            help="Launch script, YAML of arguments, training log or Megatron-Bridge configuration, - for stdin; then the script's "
            "own arguments. Without a file: arguments alone.",
        ),
    ],
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of the job, in the place of what the file states.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Variable that the script finds; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Convert a Megatron launch to a spec. Arguments that are unknown or that a spec cannot express are errors."""
    from megaplan.importers import hf  # noqa: PLC0415  (help needs no model)
    from megaplan.importers.megatron.spec import import_megatron as read_launch  # noqa: PLC0415
    from megaplan.spec.read import display_name, read_text  # noqa: PLC0415

    alone = launch[0].startswith("--")
    name, text = ("arguments", "") if alone else (display_name(launch[0]), read_text(launch[0]))
    variables = dict(_variable(each) for each in env or ())
    imported = read_launch(text, name, overrides or (), gpus, environment=variables, argv=launch if alone else launch[1:])
    found = imported.loaded.diagnostics
    comments = [f"Imported from {name}, launch arguments of Megatron-LM."]
    comments += [f"Not imported: {line}" for item in found if item.code == "MP915" for line in item.detail.splitlines()]
    write_new(target, hf.spec_text(imported.document, comments), force=force)
    if target != STDOUT:
        output.write(f"wrote {target}\n")
    output.report(found)
    return 0


def _variable(text: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is no NAME=VALUE, such as TP=8.", param_hint="--env")
    return name, value
