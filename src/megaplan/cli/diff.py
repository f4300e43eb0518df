"""`megaplan diff`: what changes from one plan to another."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from megaplan.cli.options import AsJson
from megaplan.terminal import output

DIFFERS = 1
FAILED_ON = 3


class Format(StrEnum):
    """Output format of the difference."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="Baseline plan.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Proposed plan.")],
    *,
    shape: Annotated[Format, typer.Option("--format", help="Output format; markdown suits a review comment.")] = Format.TEXT,
    as_json: AsJson = False,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", metavar="CONDITIONS", help="Exit 3 if B meets a condition: oom,headroom<4GiB.")
    ] = None,
) -> int:
    """Compare two plans: status flips, cuts, owners, settings, and every rank's bytes by column."""
    from megaplan.api.plans import diff as compared  # noqa: PLC0415
    from megaplan.cli.fail_on import parse_conditions  # noqa: PLC0415

    conditions = parse_conditions(fail_on) if fail_on is not None else ()
    found = compared(before, after)
    output.report(found.diagnostics)
    if as_json or shape is Format.JSON:
        from megaplan.cli.diff_json import diff_document  # noqa: PLC0415

        output.write_json(diff_document(found.changes, found.step_times))
    elif shape is Format.MARKDOWN:
        from megaplan.cli.diff_markdown import diff_markdown  # noqa: PLC0415

        output.write(diff_markdown(found.changes))
    else:
        from megaplan.cli.diff_text import diff_lines  # noqa: PLC0415

        output.write_styled(diff_lines(found.changes))
    met = [reason for condition in conditions for reason in condition.met_by(found.after.estimates)]
    output.note(met)
    if met:
        return FAILED_ON
    return 0 if found.same else DIFFERS
