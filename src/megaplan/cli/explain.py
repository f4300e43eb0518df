"""`megaplan explain`: what a code, a budget column or a mesh axis means."""

from __future__ import annotations

from typing import Annotated

import typer

from megaplan.terminal import output


def explain(
    topic: Annotated[str, typer.Argument(metavar="CODE|COLUMN|AXIS", help="MP203, activations, or tp; `list` prints all of them.")],
) -> int:
    """Explain a diagnostic code, a budget column (its formula), or a mesh axis (and what it cannot fix)."""
    from megaplan.cli.topics import topic_lines  # noqa: PLC0415

    output.write_styled(topic_lines(topic))
    return 0
