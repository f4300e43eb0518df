"""`check_plan`: checks that a plan is still the decision and estimate of today."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.layout.step_time import planned_time, time_document, time_text
from megaplan.partition.values import StackCosts, stack_costs
from megaplan.plan.diff import PlanDiff, diff_plans, stale_topics
from megaplan.plan.document import PlanDocument
from megaplan.plan.make import replan
from megaplan.plan.read import LoadedPlan
from megaplan.results import Result, Row
from megaplan.units import format_bytes

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts
    from megaplan.layout.step_time import PlannedTime
    from megaplan.partition.gain import Gain

FORMAT = "megaplan.check/1"


@dataclass(frozen=True, repr=False)
class Check(Result):
    """Result of a check.

    Attributes:
        findings: Errors (the check fails) and warnings (a drift of estimates, which fails only a strict check).
        drift: Differences from the plan made again.
        replanned: Plan that its inputs give today.
        gain: Gain of the best cuts under its constraints over a manual split; None in the other modes.
    """

    findings: tuple[Diagnostic, ...]
    drift: PlanDiff
    replanned: PlanDocument
    gain: Gain | None = None

    @cached_property
    def step_time(self) -> PlannedTime | str:
        """The time of a step of `replanned`, or the reason that none is stated."""
        return planned_time(self.replanned.spec, self.replanned.spans, self.replanned.inventory)

    def _summary(self) -> Sequence[str]:
        verdict = "up to date" if not self.findings else "passes, with warnings" if self.passes(strict=False) else "fails"
        return (self.replanned.spec.name, verdict, time_text(self.step_time))

    def _rows(self) -> Sequence[Row]:
        return [{"code": each.code, "severity": str(each.severity), "summary": each.summary} for each in self.findings]

    def to_dict(self) -> dict[str, Any]:
        """The document that `megaplan check --json` prints without `--strict` and `--fail-on`."""
        return self.document(strict=False, failed_on=())

    def document(self, *, strict: bool, failed_on: Sequence[str]) -> dict[str, Any]:
        """The document of a check.

        Args:
            strict: Warnings fail it too.
            failed_on: Texts of `--fail-on` conditions that hold.
        """
        found = {
            "passes": self.passes(strict=strict),
            "strict": strict,
            "diagnostics": [item.as_document() for item in self.findings],
            "optimum": asdict(self.gain) if self.gain is not None else None,
            "failed_on": list(failed_on),
        }
        return {"format": FORMAT, **found, "time": time_document(self.step_time)}

    def passes(self, *, strict: bool) -> bool:
        """True if the check passes; with `strict` it fails on warnings, too."""
        failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return not any(found.severity in failing for found in self.findings)


def check_plan(loaded: LoadedPlan, name: str, costs: MeasuredCosts | None = None) -> Check:
    """Plan the inputs again, with the plan as baseline, and compare.

    Args:
        loaded: A plan that was read, with or without a valid digest.
        name: Name of the file in diagnostics.
        costs: The costs file that decides the cuts; without it a plan that was cut by a costs file keeps its cuts (MP415).

    Raises:
        MegaplanError: The inputs cannot be planned any more.
    """
    plan = loaded.plan
    replanned, place = replan(plan, costs), Location(file=name)
    drift = diff_plans(plan, replanned)
    weights = stack_costs(plan.spec, plan.inventory, costs) if costs is not None else None
    findings = [*loaded.tampered, *loaded.warnings, *_costs(plan, costs, place), *_findings(plan, replanned, drift, place, weights)]
    gain = None
    if plan.decisions.split.mode == "manual":
        from megaplan.partition.gain import gain_of_optimum  # noqa: PLC0415  (only a manual split is weighed against the best one)

        gain = gain_of_optimum(plan.spec, plan.inventory, plan.spans, costs)
    return Check(tuple(findings), drift, replanned, gain)


def _costs(plan: PlanDocument, costs: MeasuredCosts | None, place: Location) -> Iterator[Diagnostic]:
    recorded = plan.decisions.split.costs
    if costs is not None and costs.digest != recorded:
        yield diagnostic("MP414", f"the plan   {recorded or 'no costs file'}\nthe costs  {costs.digest}", place)
    elif costs is None and recorded is not None:
        yield diagnostic("MP415", f"the plan records {recorded}", place, (f"megaplan check {place.file} --costs FILE",), Severity.WARNING)


def _findings(
    plan: PlanDocument, replanned: PlanDocument, drift: PlanDiff, place: Location, weights: StackCosts | None
) -> Iterator[Diagnostic]:
    changed = [change.key for change in (*drift.decisions, *drift.split)]
    changed += [f"layers {move.start}-{move.stop - 1} ({move.letters})" for move in drift.moves] + [move.block for move in drift.owners]
    if changed:
        yield diagnostic("MP410", f"decided differently: {', '.join(changed)}", place)
    stale = stale_topics(plan, costs=weights)
    if stale:
        detail = f"changed since it was decided: {', '.join(stale)}\nreason: {plan.decisions.split.reason}"
        yield diagnostic("MP412", detail, place)
    if plan.estimates.fits and not replanned.estimates.fits:
        over = [f"{rank.label}: over by {format_bytes(-rank.headroom_bytes)}" for rank in replanned.estimates.ranks if not rank.fits]
        yield diagnostic("MP413", "\n".join(over), place, (f"megaplan estimate {place.file}",))
    elif not changed and (drift.ranks or drift.other):
        yield diagnostic("MP411", "\n".join(_drifted(drift)), place, severity=Severity.WARNING)


def _drifted(drift: PlanDiff) -> Iterator[str]:
    for rank in drift.ranks:
        for change in rank.columns:
            label = rank.after.label if rank.after else "a removed rank"
            yield f"{label}: {change.key} {change.before:,} → {change.after:,}"
    for change in drift.other:
        yield f"{change.key}: {change.before} → {change.after}"
