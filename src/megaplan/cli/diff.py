"""`megaplan diff`: the changes from one plan to another."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from megaplan.cli.options import AsJson, FailOn
from megaplan.terminal import output

DIFFERS = 1


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
    fail_on: FailOn = None,
) -> int:
    """Compare two plans: status flips, step time, cuts, owners, settings, and every rank's bytes by column."""
    from megaplan.api.plans import diff as compared  # noqa: PLC0415
    from megaplan.cli.fail_on import FAILED_ON, met, parse_conditions  # noqa: PLC0415

    conditions = parse_conditions(fail_on)
    found = compared(before, after)
    output.report(found.diagnostics)
    if as_json or shape is Format.JSON:
        from megaplan.cli.diff_json import diff_document  # noqa: PLC0415

        output.write_json(diff_document(found.changes, found.step_times))
    elif shape is Format.MARKDOWN:
        from megaplan.cli.diff_markdown import diff_markdown  # noqa: PLC0415

        output.write(diff_markdown(found.changes, found.step_times))
    else:
        from megaplan.cli.diff_text import diff_lines  # noqa: PLC0415

        output.write_styled(diff_lines(found.changes, found.step_times))
    reasons = met(conditions, found.after.estimates, lambda: found.step_times)
    output.note(reasons)
    if reasons:
        return FAILED_ON
    return 0 if found.same else DIFFERS
