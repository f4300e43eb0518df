"""`megaplan explain`: the meaning of a code, a budget column, a mesh axis, a cost, a term or a key."""

from typing import Annotated

import typer

from megaplan.cli.completion import topics
from megaplan.terminal import output


def explain(
    topic: Annotated[
        str,
        typer.Argument(
            metavar="CODE|COLUMN|AXIS|TERM|KEY",
            help="Topic, like MP203, activations, tp, MFU or sharding.prefetch; `list` prints all.",
            autocompletion=topics,
        ),
    ],
) -> int:
    """Explain a diagnostic code, a budget column (its formula), a mesh axis (and its limits), a cost, a term, or a key of a spec."""
    from megaplan.cli.topics import topic_lines  # noqa: PLC0415

    output.write_styled(topic_lines(topic))
    return 0
