"""The objective of weighted cuts: the spec's own, its default, or the bottleneck if a step is too long to be replayed."""

from __future__ import annotations

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.partition.values import CutObjective
from megaplan.schedules import MAX_REPLAYED
from megaplan.spec.models import Spec
from megaplan.spec.pattern import BOUNDARY


def objective_of(spec: Spec) -> CutObjective:
    """The objective of weighted cuts. With thousands of microbatches per rank, the step is the bottleneck plus fill and drain."""
    return "bottleneck" if spec.num_actions > MAX_REPLAYED else asked_objective(spec)


def asked_objective(spec: Spec) -> CutObjective:
    """The objective that the spec states, or the default: step_time for a weighted split of a pipeline of megarun, else bottleneck.

    The steps of other hosts are those of a model of their software, not of the replayed schedule that step_time shortens.
    """
    if spec.split.objective is not None:
        return spec.split.objective
    weighted = spec.split.mode == "weighted" and BOUNDARY not in spec.model.pattern
    return "step_time" if weighted and spec.mesh.pp > 1 and spec.host.kind.trained else "bottleneck"


def objective_notes(spec: Spec) -> list[Diagnostic]:
    """MP315 if cuts are chosen for another objective than the spec's."""
    if objective_of(spec) == asked_objective(spec):
        return []
    detail = (
        f"split.objective = step_time, the schedule has up to {spec.num_actions:,} actions, and at most {MAX_REPLAYED:,} are replayed: "
        "the cuts are chosen for objective bottleneck"
    )
    return [diagnostic("MP315", detail, Location(key="split.objective"), ("--set split.objective=bottleneck",), Severity.NOTE)]
