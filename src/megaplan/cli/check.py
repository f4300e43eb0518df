"""`megaplan check`: whether today's megaplan still makes and estimates a plan the same way."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from megaplan.cli.options import AsJson, CostsFile, FailOn, PlanFile
from megaplan.terminal import output

FORMAT = "megaplan.check/1"
FAILS = 1


def check(
    plan: PlanFile,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Fail also if only the estimates have drifted.")] = False,
    fail_on: FailOn = None,
    costs: CostsFile = None,
    as_json: AsJson = False,
) -> int:
    """Plan a plan's inputs again: changed decisions, digest, stale reasons, and whether it still fits."""
    from megaplan.api.plans import check as checked  # noqa: PLC0415
    from megaplan.cli.fail_on import FAILED_ON, met, parse_conditions  # noqa: PLC0415

    conditions = parse_conditions(fail_on, compares=False)
    result = checked(plan, costs=costs)
    passes = result.passes(strict=strict)
    reasons = met(conditions, result.replanned.estimates, lambda: (None, result.step_time))
    if as_json:
        from megaplan.api.estimate_json import time_document  # noqa: PLC0415

        findings = [output.as_document(found) for found in result.findings]
        optimum = asdict(result.gain) if result.gain is not None else None
        found = {"passes": passes, "strict": strict, "diagnostics": findings, "optimum": optimum, "failed_on": reasons}
        output.write_json({"format": FORMAT, **found, "time": time_document(result.step_time)})
    else:
        output.report(result.findings)
        if result.gain is not None:
            from megaplan.cli.stages_text import gain_lines  # noqa: PLC0415

            output.write_styled((line, "") for line in gain_lines(result.gain))
        output.write(f"{plan}: {'up to date' if not result.findings else 'passes, with warnings' if passes else 'fails'}\n")
    output.note(reasons)
    if not passes:
        return FAILS
    return FAILED_ON if reasons else 0
