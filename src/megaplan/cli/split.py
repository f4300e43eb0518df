"""`megaplan split`: find the pipeline stages, and write the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.cli.options import AsJson, CostsFile, Overrides, SpecFile
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.terminal import output

if TYPE_CHECKING:
    from megaplan.plan.document import PlanDocument

FORMAT = "megaplan.split/1"
NO_SPLIT = 1
INFEASIBLE = frozenset({"MP330", "MP336"})
"""Codes of a valid input that has no feasible split."""


class Mode(StrEnum):
    """The method that chooses the cuts."""

    EQUAL = "equal"
    WEIGHTED = "weighted"
    MANUAL = "manual"


class Objective(StrEnum):
    """The quantity that weighted cuts minimise."""

    BOTTLENECK = "bottleneck"
    STEP_TIME = "step_time"


def split(
    spec: SpecFile,
    *,
    target: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = None,
    mode: Annotated[Mode | None, typer.Option("--mode", help="Override the spec's split.mode.")] = None,
    objective: Annotated[Objective | None, typer.Option("--objective", help="Override the spec's split.objective.")] = None,
    costs: CostsFile = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="PLAN", help="Prefer this plan's cuts where they are equally good.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Find provably optimal pipeline stages, and write the plan. Exits 1 if no split is feasible."""
    from megaplan.budget.padding import padding_diagnostics  # noqa: PLC0415
    from megaplan.cli.files import STDOUT, check_target, write_whole  # noqa: PLC0415
    from megaplan.cli.inputs import load_costs  # noqa: PLC0415
    from megaplan.inventory.build import build_inventory  # noqa: PLC0415
    from megaplan.layout.build import build_layout  # noqa: PLC0415
    from megaplan.layout.spans import cuts_of  # noqa: PLC0415
    from megaplan.plan.diff import stale_topics  # noqa: PLC0415
    from megaplan.plan.make import make_plan, plan_text  # noqa: PLC0415
    from megaplan.plan.read import read_plan  # noqa: PLC0415
    from megaplan.spec.load import load_spec  # noqa: PLC0415
    from megaplan.split.choose import choose_cuts  # noqa: PLC0415
    from megaplan.split.costs import stack_costs  # noqa: PLC0415
    from megaplan.split.report import in_flight_lines, moved_lines  # noqa: PLC0415

    if target is not None and target != STDOUT:
        check_target(target, spec)
    asked = [*(overrides or ())]
    asked += [f"split.{key}={value}" for key, value in (("mode", mode), ("objective", objective)) if value is not None]
    try:
        loaded = load_spec(spec, asked)
        earlier = read_plan(baseline) if baseline is not None else None
        inventory = build_inventory(loaded.spec)
        measured = load_costs(costs, spec, loaded.spec, inventory)
        weights = stack_costs(loaded.spec, inventory, measured)
        cuts = choose_cuts(loaded.spec, inventory, baseline=earlier.spans if earlier else None, measured=measured)
        if unfit := [replace(found, severity=Severity.ERROR) for found in cuts.diagnostics if found.code == "MP336"]:
            raise MegaplanError(unfit)
    except MegaplanError as error:
        if not INFEASIBLE.issuperset(found.code for found in error.diagnostics if found.severity is Severity.ERROR):
            raise
        output.fail(error.diagnostics, as_json=as_json)
        return NO_SPLIT
    plan = make_plan(loaded.spec, baseline=earlier, overrides=asked, cuts=cuts, costs=measured)
    layout = build_layout(loaded.spec, inventory, cuts.spans)
    found = [*loaded.diagnostics, *cuts.diagnostics, *padding_diagnostics(loaded.spec, inventory, layout)]
    stale = stale_topics(plan, since=earlier, costs=weights)
    if stale:
        found.append(_stale(stale, plan, spec))
    if target is not None:
        write_whole(target, plan_text(plan))
    if target == STDOUT:
        output.report(found)
        return 0
    notes = list(in_flight_lines(loaded.spec, inventory, cuts.spans))
    if cuts.mode == "weighted":
        if cuts.objective == "step_time":
            from megaplan.split.step import Pipeline  # noqa: PLC0415

            weights = Pipeline(loaded.spec, inventory, measured).costs
        notes = [*moved_lines(loaded.spec, inventory, weights, cuts_of(cuts.spans)), *notes]
    _answer(plan, target, found, notes, as_json=as_json)
    if not as_json:
        output.report(found)
    return 0


def _answer(plan: PlanDocument, target: str | None, found: Sequence[Diagnostic], notes: Sequence[str], *, as_json: bool) -> None:
    from megaplan.layout.step_time import PlannedTime, planned_time  # noqa: PLC0415

    time = planned_time(plan.spec, plan.spans)
    if as_json:
        from megaplan.cli.estimate_json import time_document  # noqa: PLC0415

        diagnostics = [output.as_document(item) for item in found]
        stages = [stage.model_dump(mode="json") for stage in plan.decisions.stages]
        how = plan.decisions.split.model_dump(mode="json")
        output.write_json(
            {
                **{"format": FORMAT, "plan": target, "digests": plan.digests.model_dump()},
                **{"split": how, "stages": stages, "time": time_document(time), "diagnostics": diagnostics},
            }
        )
        return
    from megaplan.cli.stages_text import certificate_line, family_counts, stage_lines  # noqa: PLC0415
    from megaplan.terminal.table import wrap  # noqa: PLC0415

    decided = plan.decisions
    lines = [(f"{plan.spec.name}: {family_counts(decided.pattern.expanded)}", "bold")]
    lines += [(line, "") for line in wrap(certificate_line(decided.split.certificate, decided.split.mode), indent="  ")]
    if decided.split.reason:
        lines += [(line, "") for line in wrap(f"reason: {decided.split.reason}", indent="  ")]
    lines += [("", ""), *((line, "") for line in stage_lines(plan)), ("", "")]
    if isinstance(time, PlannedTime):
        from megaplan.cli.estimate_text import time_lines  # noqa: PLC0415

        lines += [*((line, "") for line in time_lines(time)), ("", "")]
    lines += [(line, "") for note in notes for line in wrap(note, indent="  ")] + ([("", "")] if notes else [])
    lines.append((f"wrote {target}" if target else "nothing written; -o FILE writes the plan", ""))
    lines.append((plan.digests.plan, "dim"))
    output.write_styled(lines)


def _stale(topics: Sequence[str], plan: PlanDocument, file: str) -> Diagnostic:
    detail = f"changed since it was decided: {', '.join(topics)}\nreason: {plan.decisions.split.reason}"
    return diagnostic("MP412", detail, Location(file=file, key="split.reason"), severity=Severity.WARNING)
