"""`check_plan`: whether a plan is still what would be decided and estimated today."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.plan.diff import PlanDiff, diff_plans, stale_topics
from megaplan.plan.document import PlanDocument
from megaplan.plan.make import replan
from megaplan.plan.read import LoadedPlan


@dataclass(frozen=True, slots=True)
class Check:
    """What a check found.

    Attributes:
        findings: Errors (the check fails) and warnings (a drift of estimates, which fails only a strict check).
        drift: What differs from the plan made anew.
    """

    findings: tuple[Diagnostic, ...]
    drift: PlanDiff

    def passes(self, *, strict: bool) -> bool:
        """Whether nothing fails the check; `strict` makes warnings fail it too."""
        failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
        return not any(found.severity in failing for found in self.findings)


def check_plan(loaded: LoadedPlan, name: str) -> Check:
    """Plan the inputs again, with the plan as baseline, and compare.

    Args:
        loaded: A plan as read, whether or not its digest holds.
        name: What diagnostics call the file.

    Raises:
        MegaplanError: Its inputs cannot be planned any more.
    """
    plan = loaded.plan
    anew = replan(plan)
    drift = diff_plans(plan, anew)
    findings = [*loaded.tampered, *loaded.warnings, *_findings(plan, anew, drift, Location(file=name))]
    return Check(tuple(findings), drift)


def _findings(plan: PlanDocument, anew: PlanDocument, drift: PlanDiff, place: Location) -> Iterator[Diagnostic]:
    changed = [change.key for change in (*drift.decisions, *drift.split)]
    changed += [f"layers {move.start}-{move.stop - 1} ({move.letters})" for move in drift.moves] + [move.block for move in drift.owners]
    if changed:
        yield diagnostic("MP410", f"decided differently: {', '.join(changed)}", place)
    stale = stale_topics(plan)
    if stale:
        detail = f"changed since it was decided: {', '.join(stale)}\nreason: {plan.decisions.split.reason}"
        yield diagnostic("MP412", detail, place)
    if plan.estimates.fits and not anew.estimates.fits:
        over = [f"{rank.label}: over by {-rank.headroom_bytes:,} bytes" for rank in anew.estimates.ranks if not rank.fits]
        yield diagnostic("MP413", "\n".join(over), place, (f"megaplan estimate {place.file}",))
    elif not changed and (drift.ranks or drift.other):
        yield diagnostic("MP411", "\n".join(_drifted(drift)), place, severity=Severity.WARNING)


def _drifted(drift: PlanDiff) -> Iterator[str]:
    for rank in drift.ranks:
        for change in rank.columns:
            label = rank.after.label if rank.after else "a rank that is gone"
            yield f"{label}: {change.key} {change.before:,} → {change.after:,}"
    for change in drift.other:
        yield f"{change.key}: {change.before} → {change.after}"
