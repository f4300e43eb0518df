"""`megaplan diff`: the changes from one plan to another, or of all plans between two git revisions."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.options import AsJson, FailOn
from megaplan.terminal import output

if TYPE_CHECKING:
    from megaplan.api.plans import Diff

DIFFERS = 1
FORMAT = "megaplan.diffs/1"


class Format(StrEnum):
    """Output format of the difference."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="Baseline plan; or git revisions: main...HEAD, or main for the files here.")],
    after: Annotated[list[str] | None, typer.Argument(metavar="[B]", help="Proposed plan; after revisions, files or folders.")] = None,
    *,
    shape: Annotated[Format, typer.Option("--format", help="Output format; markdown suits a review comment.")] = Format.TEXT,
    as_json: AsJson = False,
    fail_on: FailOn = None,
) -> int:
    """Compare two plans: status flips, step time, cuts, owners, settings, and every rank's bytes by column."""
    from megaplan.api.plans import diff as compared  # noqa: PLC0415
    from megaplan.cli.fail_on import FAILED_ON, met, parse_conditions  # noqa: PLC0415
    from megaplan.cli.revisions import is_revision  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415

    conditions = parse_conditions(fail_on)
    shape = Format.JSON if as_json else shape
    others = after or []
    if len(others) == 1 and not is_revision(before):
        found = compared(before, others[0])
        document = _written(found, shape)
        if document is not None:
            output.write_json(document)
        reasons = met(conditions, found.after.estimates, lambda: found.step_times)
        output.note(reasons)
        return FAILED_ON if reasons else 0 if found.same else DIFFERS
    if not is_revision(before):
        raise refuse(
            "MP480",
            f"{len(others) + 1} plans are given, but a diff compares two",
            "megaplan diff OLD.json NEW.json",
            "megaplan diff main...HEAD",
        )
    return _of_revisions(before, others, shape, lambda each: met(conditions, each.after.estimates, lambda: each.step_times))


def _written(found: Diff, shape: Format) -> dict[str, Any] | None:
    """Writes a difference; as JSON it is returned."""
    output.report(found.diagnostics)
    if shape is Format.JSON:
        return found.to_dict()
    if shape is Format.MARKDOWN:
        from megaplan.cli.diff_markdown import diff_markdown  # noqa: PLC0415

        output.write(diff_markdown(found.changes, found.step_times, found.parts))
    else:
        from megaplan.cli.diff_text import diff_lines  # noqa: PLC0415

        output.write_styled(diff_lines(found.changes, found.step_times, found.parts))
    return None


def _of_revisions(revisions: str, paths: list[str], shape: Format, reasons_of: Callable[[Diff], list[str]]) -> int:
    """Compare each plan that changed; a new or removed one is named."""
    from megaplan.api.plans import diff as compared  # noqa: PLC0415
    from megaplan.cli.fail_on import FAILED_ON  # noqa: PLC0415
    from megaplan.cli.revisions import changed_plans  # noqa: PLC0415

    plans, documents, failed = changed_plans(revisions, paths), list[dict[str, Any]](), False
    for plan in plans:
        both = plan.before is not None and plan.after is not None
        state = "changed" if both else "new" if plan.before is None else "removed"
        if shape is Format.MARKDOWN:
            output.write(f"### {plan.path}: {state}\n")
        elif shape is Format.TEXT:
            output.write_styled([(f"{plan.path}: {state}", "bold")])
        document = None
        if plan.before is not None and plan.after is not None:
            found = compared(plan.before, plan.after)
            document = _written(found, shape)
            reasons = reasons_of(found)
            output.note([f"{plan.path}: {reason}" for reason in reasons])
            failed = failed or bool(reasons)
        if shape is Format.TEXT:
            output.write("\n")
        documents.append({"path": plan.path, "state": state, "diff": document})
    if shape is Format.JSON:
        output.write_json({"format": FORMAT, "revisions": revisions, "plans": documents})
    elif not plans:
        output.write(f"{revisions}: no plan differs\n")
    return FAILED_ON if failed else DIFFERS if plans else 0
