"""`megaplan import megatron`: launch arguments of Megatron-LM as a spec file."""

from __future__ import annotations

from typing import Annotated

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import Overrides
from megaplan.terminal import output


def import_megatron(
    launch: Annotated[str, typer.Argument(metavar="FILE", help="Launch arguments, as a shell script or YAML; - for stdin.")],
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of the job, if the file does not state them.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Convert Megatron launch arguments to a spec. Arguments that are unknown or that a spec cannot express are errors."""
    from megaplan.importers import hf  # noqa: PLC0415  (help needs no model)
    from megaplan.importers.megatron.spec import import_megatron as read_launch  # noqa: PLC0415
    from megaplan.spec.read import display_name, read_text  # noqa: PLC0415

    name = display_name(launch)
    imported = read_launch(read_text(launch), name, overrides or (), gpus)
    found = imported.loaded.diagnostics
    comments = [f"Imported from {name}, launch arguments of Megatron-LM."]
    comments += [f"Not imported: {line}" for item in found if item.code == "MP915" for line in item.detail.splitlines()]
    write_new(target, hf.spec_text(imported.document, comments), force=force)
    if target != STDOUT:
        output.write(f"wrote {target}\n")
    output.report(found)
    return 0
