"""`megaplan import maxtext`: a run of MaxText as a spec file."""

from typing import Annotated

import typer

from megaplan.cli.files import STDOUT, write_spec
from megaplan.cli.options import Overrides


def import_maxtext(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|KEY=VALUE...",
            help="base.yml, a model's file, a script, and arguments; later ones override earlier ones; - for stdin.",
        ),
    ],
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    devices: Annotated[
        int | None, typer.Option("--devices", metavar="N", min=1, help="Devices of the run, if no topology is named.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", metavar="KEY", help="Leave out a key; repeatable.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse every key that the importer does not know.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Convert a run of MaxText to a spec. Keys that decide a tensor and that a spec cannot express are errors."""
    from megaplan.importers.maxtext.spec import import_maxtext as read_run  # noqa: PLC0415  (help needs no model)
    from megaplan.importers.structure import Policy  # noqa: PLC0415

    imported = read_run(inputs, overrides or (), devices, Policy(strict=strict, ignored=frozenset(ignore or ())))
    write_spec(target, imported, f"Imported from a run of MaxText: {' '.join(inputs)}", force=force)
    return 0
