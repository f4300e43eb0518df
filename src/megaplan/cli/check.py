"""`megaplan check`: whether a plan is still what would be decided and estimated today."""

from __future__ import annotations

from typing import Annotated

import typer

from megaplan.cli import output
from megaplan.cli.options import AsJson, PlanFile

FORMAT = "megaplan.check/1"


def check(
    plan: PlanFile,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="A drift of estimates alone fails too.")] = False,
    as_json: AsJson = False,
) -> int:
    """Plan a plan's inputs again: changed decisions, digest, stale reasons, and whether it still fits."""
    from megaplan.plan.check import check_plan  # noqa: PLC0415
    from megaplan.plan.read import inspect_plan  # noqa: PLC0415

    result = check_plan(inspect_plan(plan), plan)
    passes = result.passes(strict=strict)
    if as_json:
        findings = [output.as_document(found) for found in result.findings]
        output.write_json({"format": FORMAT, "passes": passes, "strict": strict, "diagnostics": findings})
    else:
        output.report(result.findings)
        output.write(f"{plan}: {'up to date' if not result.findings else 'passes, with warnings' if passes else 'fails'}\n")
    return 0 if passes else 1
