"""What weighted cuts are chosen for: the spec's objective, or the bottleneck where a step is too long to be replayed."""

from __future__ import annotations

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.partition.values import Objective
from megaplan.schedules import MAX_REPLAYED
from megaplan.spec.models import Spec


def objective_of(spec: Spec) -> Objective:
    """Of the spec's weighted cuts. With thousands of microbatches a rank, the bottleneck is the step but for its fill and drain."""
    return "bottleneck" if spec.num_actions > MAX_REPLAYED else spec.split.objective


def objective_notes(spec: Spec) -> list[Diagnostic]:
    """MP315 where cuts are chosen for another objective than the spec's."""
    if objective_of(spec) == spec.split.objective:
        return []
    detail = (
        f"split.objective = step_time, the schedule has up to {spec.num_actions:,} actions, and at most {MAX_REPLAYED:,} are replayed: "
        "the cuts are chosen for objective bottleneck"
    )
    return [diagnostic("MP315", detail, Location(key="split.objective"), ("--set split.objective=bottleneck",), Severity.NOTE)]
