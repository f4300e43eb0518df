"""`megaplan check`: whether today's megaplan still makes and estimates plans the same way, and of the same specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli import completion
from megaplan.cli.options import AsJson, CostsFile, FailOn
from megaplan.errors import MegaplanError
from megaplan.terminal import output
from megaplan.terminal.exit_status import ERROR

if TYPE_CHECKING:
    from megaplan.plan.check import Check

SEVERAL = "megaplan.checks/1"
FAILS = 1


def check(
    plans: Annotated[
        list[str],
        typer.Argument(metavar="PLAN...", help="Plans, or patterns like 'plans/*.json'; - for stdin.", autocompletion=completion.plans),
    ],
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Also fail if only the estimates have drifted.")] = False,
    spec: Annotated[
        str | None, typer.Option("--spec", metavar="FILE", help="The plan's spec, to detect edits; by default NAME.yaml for NAME.json.")
    ] = None,
    signer: Annotated[
        str | None,
        typer.Option("--signer", metavar="FILE", help="A public key (PEM); each plan must have a valid signature PLAN.sig of it."),
    ] = None,
    fail_on: FailOn = None,
    costs: CostsFile = None,
    as_json: AsJson = False,
) -> int:
    """Plan the inputs of plans again: changed decisions, digest, edited specs, stale reasons, and whether they still fit."""
    from megaplan.api.plans import check as checked  # noqa: PLC0415
    from megaplan.cli.fail_on import FAILED_ON, met, parse_conditions  # noqa: PLC0415
    from megaplan.cli.files import expanded  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.plan.check import FORMAT  # noqa: PLC0415

    conditions = parse_conditions(fail_on, compares=False)
    names = expanded(plans)
    if len(names) > 1 and (spec is not None or costs is not None):
        option = "--spec" if spec is not None else "--costs"
        raise refuse("MP480", f"{option} belongs to one plan, but {len(names)} are given", f"megaplan check {names[0]} {option} FILE")
    status, documents = 0, list[dict[str, Any]]()
    for name in names:
        try:
            result = checked(name, costs=costs, spec=spec, signer=signer)
        except MegaplanError as error:
            if len(names) == 1:
                raise
            status = ERROR
            documents.append({"format": FORMAT, "passes": False, "diagnostics": [found.as_document() for found in error.diagnostics]})
            if not as_json:
                output.report(error.diagnostics)
                output.write_styled([(f"{name}: cannot be checked", "bold red")])
            continue
        reasons = met(conditions, result.replanned.estimates, lambda result=result: (None, result.step_time))  # type: ignore[misc]
        passes = result.passes(strict=strict)
        if as_json:
            documents.append(result.document(strict=strict, failed_on=reasons))
        else:
            _write(name, result, passes=passes)
        output.note(reasons)
        own = FAILS if not passes else FAILED_ON if reasons else 0
        status = next(each for each in (ERROR, FAILS, FAILED_ON, 0) if each in (status, own))
    if as_json:
        several = {"format": SEVERAL, "checks": [{"plan": name, **found} for name, found in zip(names, documents, strict=True)]}
        output.write_json(documents[0] if len(documents) == 1 else several)
    return status


def _write(name: str, result: Check, *, passes: bool) -> None:
    output.report(result.findings)
    if result.gain is not None:
        from megaplan.cli.stages_text import gain_lines  # noqa: PLC0415

        output.write_styled((line, "") for line in gain_lines(result.gain))
    verdict, style = (
        ("up to date", "green") if not result.findings else ("passes, with warnings", "yellow") if passes else ("fails", "bold red")
    )
    output.write_styled([(f"{name}: {verdict}", style)])
