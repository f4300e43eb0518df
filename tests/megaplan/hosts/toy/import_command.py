"""`megaplan import toy`."""

from typing import Annotated

import typer

from megaplan.terminal import output


def import_toy(launch: Annotated[str, typer.Argument(metavar="LAUNCH")]) -> int:
    """Print the section of a launch of the toy host."""
    output.write(f"host: {{name: toy, copies: {launch}}}\n")
    return 0
