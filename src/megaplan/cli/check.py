"""`megaplan check`: whether today's megaplan still makes and estimates a plan the same way."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from megaplan.cli.options import AsJson, CostsFile, PlanFile
from megaplan.terminal import output

FORMAT = "megaplan.check/1"
FAILS = 1


def check(
    plan: PlanFile,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Fail also if only the estimates have drifted.")] = False,
    costs: CostsFile = None,
    as_json: AsJson = False,
) -> int:
    """Plan a plan's inputs again: changed decisions, digest, stale reasons, and whether it still fits."""
    from megaplan.api.plans import check as checked  # noqa: PLC0415

    result = checked(plan, costs=costs)
    passes = result.passes(strict=strict)
    if as_json:
        findings = [output.as_document(found) for found in result.findings]
        optimum = asdict(result.gain) if result.gain is not None else None
        output.write_json({"format": FORMAT, "passes": passes, "strict": strict, "diagnostics": findings, "optimum": optimum})
    else:
        output.report(result.findings)
        if result.gain is not None:
            from megaplan.cli.stages_text import gain_lines  # noqa: PLC0415

            output.write_styled((line, "") for line in gain_lines(result.gain))
        output.write(f"{plan}: {'up to date' if not result.findings else 'passes, with warnings' if passes else 'fails'}\n")
    return 0 if passes else FAILS
