"""`megaplan new`: a bundled spec to start from."""

import os
from pathlib import Path
from typing import Annotated

import typer

import megaplan
from megaplan.cli.files import STDOUT, write_new
from megaplan.terminal import output


def new(
    name: Annotated[str, typer.Argument(help="A bundled spec; `list` prints their names.")],
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> int:
    """Print a bundled spec to start from, or write it to a file."""
    bundled = bundled_specs()
    if name == "list":
        output.write("".join(f"{known}\n" for known in sorted(bundled)))
        return 0
    if name not in bundled:
        from megaplan.cli.problems import unknown_name  # noqa: PLC0415

        raise unknown_name("MP484", name, bundled, "megaplan new {}")
    from megaplan.spec.schema import SCHEMA_FILE, editor_line  # noqa: PLC0415  (a list of names needs no model)

    write_new(target, editor_line(SCHEMA_FILE) + bundled[name].read_text(encoding="utf-8"), force=force)
    if target != STDOUT:
        output.write(f"wrote {target}\n")
        schema = Path(target).with_name(SCHEMA_FILE)
        if not os.path.exists(schema):
            output.write(f"for completion in an editor: megaplan schema spec > {schema}\n")
    return 0


def bundled_specs() -> dict[str, Path]:
    """Bundled specs by name, from the installed package or from the source tree."""
    package = Path(megaplan.__file__).parent
    for folder in (package / "plans", package.parent.parent / "plans"):
        if os.path.isdir(folder):
            return {path.stem: path for path in folder.glob("*.yaml")}
    return {}
