"""`megaplan explain`: the meaning of a code, a budget column, a mesh axis or a cost."""

from __future__ import annotations

from typing import Annotated

import typer

from megaplan.terminal import output


def explain(
    topic: Annotated[str, typer.Argument(metavar="CODE|COLUMN|AXIS", help="Topic, like MP203, activations or tp; `list` prints all.")],
) -> int:
    """Explain a diagnostic code, a budget column (its formula), a mesh axis (and its limits), or a cost."""
    from megaplan.cli.topics import topic_lines  # noqa: PLC0415

    output.write_styled(topic_lines(topic))
    return 0
