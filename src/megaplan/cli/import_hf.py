"""`megaplan import hf`: a Hugging Face config as a spec file."""

from typing import Annotated

import typer

from megaplan.cli.examples import epilog_of
from megaplan.cli.files import STDOUT, write_spec
from megaplan.cli.options import Overrides

group = typer.Typer(name="import", help="Convert other projects' model configs to specs.", no_args_is_help=True)


@group.callback()
def _group() -> None:
    """Convert other projects' model configs to specs."""


@group.command("hf", epilog=epilog_of("import hf"))
def import_hf(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json, or org/model of its cache; - for stdin.")],
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse absent fields that have a class default, and unknown fields.")] = False,
    overrides: Overrides = None,
) -> int:
    """Convert a Hugging Face config to a spec. Fields that a spec cannot express are errors."""
    from megaplan.importers.hf import import_hf as read_config  # noqa: PLC0415  (help needs no model)
    from megaplan.spec.hub import MAX_CONFIG_BYTES  # noqa: PLC0415
    from megaplan.spec.read import display_name, model_file, read_text  # noqa: PLC0415

    config = model_file(config)
    name = display_name(config)
    imported = read_config(read_text(config, MAX_CONFIG_BYTES), name, overrides or (), strict=strict)
    write_spec(target, imported, f"Imported from {name}, model_type {imported.family}.", force=force)
    return 0
