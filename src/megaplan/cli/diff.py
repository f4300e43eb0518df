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
    """Compare two plans: fit changes, cuts, owners, settings, and every rank's bytes by category."""
    from megaplan.cli.fail_on import parse_conditions  # noqa: PLC0415
    from megaplan.plan.causes import diff_with_causes  # noqa: PLC0415
    from megaplan.plan.read import inspect_plan  # noqa: PLC0415

    conditions = parse_conditions(fail_on) if fail_on is not None else ()
    old, new = inspect_plan(before), inspect_plan(after)
    output.report([*old.warnings, *new.warnings])
    tampered = tuple((file, found) for file, loaded in ((before, old), (after, new)) for found in loaded.tampered)
    found = diff_with_causes(old.plan, new.plan, tampered)
    if as_json or shape is Format.JSON:
        from megaplan.cli.diff_json import diff_document  # noqa: PLC0415
        from megaplan.layout.step_time import planned_time  # noqa: PLC0415

        output.write_json(diff_document(found, (planned_time(old.plan.spec, old.plan.spans), planned_time(new.plan.spec, new.plan.spans))))
    elif shape is Format.MARKDOWN:
        from megaplan.cli.diff_markdown import diff_markdown  # noqa: PLC0415

        output.write(diff_markdown(found))
    else:
        from megaplan.cli.diff_text import diff_lines  # noqa: PLC0415

        output.write_styled(diff_lines(found))
    met = [reason for condition in conditions for reason in condition.met_by(new.plan.estimates)]
    output.note(met)
    if met:
        return FAILED_ON
    return 0 if found.same else DIFFERS
