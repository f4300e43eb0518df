"""`megaplan.split`: decide where to cut a model into pipeline stages, and make the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megaplan.api.load import FilePath, LoadedJob, Source, as_plan, load_to_split, override_texts
from megaplan.budget.fit import DOES_NOT_FIT, padding_diagnostics
from megaplan.budget.peaks import build_budget
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.layout.build import build_layout, cuts_of
from megaplan.layout.step_time import PlannedTime, planned_time, time_document
from megaplan.partition.choose import choose_cuts
from megaplan.partition.report import in_flight_lines, moved_lines
from megaplan.partition.values import stack_costs
from megaplan.plan.diff import stale_topics
from megaplan.plan.make import make_plan, plan_text
from megaplan.plan.read import read_plan
from megaplan.results import Picture, Result, Row

if TYPE_CHECKING:
    from megaplan.partition.values import CutObjective, Cuts, Mode
    from megaplan.plan.document import PlanDocument

FORMAT = "megaplan.partition/1"
INFEASIBLE = frozenset({"MP330", DOES_NOT_FIT})
"""Codes for a valid input that has no feasible split."""


class InfeasibleError(MegaplanError):
    """Raised for a valid spec if no split meets its constraints (MP330) or fits its devices (MP501)."""


@dataclass(frozen=True, repr=False)
class Split(Result):
    """Decided cuts and the plan that records them.

    Attributes:
        job: The spec that was cut.
        plan: The plan: inputs, decisions, estimates, digests.
        cuts: Spans, mode, reason, and the certificate: value, lower bound, gap.
        step_time: The time of a step with its interval in seconds, or the reason (text) why none is stated.
        stale: Changes since the baseline's manual split was decided.
        diagnostics: Warnings and notes.
    """

    job: LoadedJob
    plan: PlanDocument
    cuts: Cuts
    step_time: PlannedTime | str
    stale: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]

    def _summary(self) -> Sequence[str]:
        return self.plan._summary()

    def _rows(self) -> Sequence[Row]:
        parameters = {each.slot: each.parameters for each in self.plan.estimates.stages}
        return [
            {
                "pp_rank": each.pp_rank,
                "chunk": each.chunk,
                "layers": f"{each.layers[0]}-{each.layers[1] - 1}" if each.layers[0] < each.layers[1] else "none",
                "letters": each.letters,
                "parameters": parameters[each.slot],
                "owns": each.owns,
            }
            for each in self.plan.decisions.stages
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document that `megaplan split --json` prints without `-o`."""
        return self.document(None)

    def document(self, target: str | None) -> dict[str, Any]:
        """The document of a split.

        Args:
            target: File to which the plan was written.
        """
        plan = self.plan
        return {
            "format": FORMAT,
            "plan": target,
            "digests": plan.digests.model_dump(),
            "split": plan.decisions.split.model_dump(mode="json"),
            "stages": [stage.model_dump(mode="json") for stage in plan.decisions.stages],
            "time": time_document(self.step_time),
            "diagnostics": [item.as_document() for item in self.diagnostics],
        }

    def plot(self) -> Picture:
        """The timeline of a step with the memory of every pipeline rank over time, as `PlanDocument.plot`."""
        return self.plan.plot()

    @property
    def text(self) -> str:
        """The canonical text of the plan file."""
        return plan_text(self.plan)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the layers that weighted cuts moved, and about a rank that holds more memory with fewer parameters."""
        spec, inventory, cuts = self.job.spec, self.job.inventory, self.cuts
        notes = tuple(in_flight_lines(spec, inventory, cuts.spans))
        if cuts.mode != "weighted" or spec.pools:
            return notes
        weights = stack_costs(spec, inventory, self.job.costs)
        if cuts.objective == "step_time":
            from megaplan.partition.step import Pipeline  # noqa: PLC0415

            weights = Pipeline(spec, inventory, self.job.costs).costs
        return (*moved_lines(spec, inventory, weights, cuts_of(cuts.spans)), *notes)

    def write(self, path: FilePath) -> None:
        """Write the plan file; an existing file is replaced.

        Raises:
            OSError: It cannot be written.
        """
        from pathlib import Path  # noqa: PLC0415

        Path(path).write_text(self.text, encoding="utf-8")


def split(
    source: Source,
    /,
    *changes: str,
    mode: Mode | None = None,
    objective: CutObjective | None = None,
    baseline: FilePath | PlanDocument | None = None,
    costs: FilePath | None = None,
    device_file: FilePath | None = None,
    **overrides: Any,
) -> Split:
    """Cut a model into pipeline stages, with a certificate, and make the plan.

    Args:
        source: A spec: a path, a mapping, or a job that was loaded.
        *changes: `KEY=VALUE` texts; the plan records them.
        mode: `equal`, `weighted` or `manual`, instead of the spec's `split.mode`.
        objective: `bottleneck` or `step_time`, instead of the spec's `split.objective`.
        baseline: A plan whose cuts are kept if equally good.
        costs: A costs file (times in ns) to cut by, instead of modelled costs.
        device_file: Device file, as in `megaplan.load`.
        **overrides: Changes as keywords: `mesh__pp=4`.

    Raises:
        InfeasibleError: No split meets the constraints, or none fits.
        MegaplanError: Every error of the source, the changes, the baseline and the costs file.
        TypeError: The same as for `megaplan.load`.

    Examples:
        >>> import megaplan
        >>> found = megaplan.split("plans/tiny-hybrid-pp2.yaml", mode="weighted")
        >>> found.plan.decisions.split.certificate.objective, len(found.plan.decisions.stages)
        ('step_time', 2)
        >>> found.text == megaplan.split("plans/tiny-hybrid-pp2.yaml", "split.mode=weighted").text
        True
    """
    asked = [*changes, *override_texts(overrides)]
    asked += [f"split.{key}={value}" for key, value in (("mode", mode), ("objective", objective)) if value is not None]
    try:
        job = load_to_split(source, asked, costs, device_file)
        earlier = _baseline(baseline)
        cuts = _decide(job, earlier)
    except MegaplanError as error:
        if INFEASIBLE.issuperset(found.code for found in error.diagnostics if found.severity is Severity.ERROR):
            raise InfeasibleError(error.diagnostics) from None
        raise
    plan = make_plan(job.spec, baseline=earlier, overrides=job.changes, cuts=cuts, costs=job.costs)
    layout = build_layout(job.spec, job.inventory, cuts.spans)
    stale = tuple(stale_topics(plan, since=earlier, costs=stack_costs(job.spec, job.inventory, job.costs)))
    found = [*job.read_diagnostics, *cuts.diagnostics, *padding_diagnostics(job.spec, job.inventory, layout)]
    if stale:
        found.append(_stale(stale, plan, job.name))
    return Split(job, plan, cuts, planned_time(plan.spec, plan.spans, plan.inventory), stale, tuple(found))


def _baseline(baseline: FilePath | PlanDocument | None) -> PlanDocument | None:
    if baseline is None:
        return None
    return read_plan(os.fspath(baseline)) if isinstance(baseline, (str, os.PathLike)) else as_plan(baseline)


def _decide(job: LoadedJob, earlier: PlanDocument | None) -> Cuts:
    """The chosen cuts; cuts that do not fit are an error here, since there is no plan to write."""
    baseline = earlier.spans if earlier else None
    cuts = choose_cuts(job.spec, job.inventory, baseline=baseline, measured=job.costs)
    if any(found.code == DOES_NOT_FIT for found in cuts.diagnostics):
        from megaplan.api.advice import advised  # noqa: PLC0415  (what fits needs none)

        layout = build_layout(job.spec, job.inventory, cuts.spans)
        budget = build_budget(job.spec, job.inventory, layout)
        raise MegaplanError([advised(job, layout, budget, cuts.diagnostics, baseline=baseline, severity=Severity.ERROR)])
    return cuts


def _stale(topics: Sequence[str], plan: PlanDocument, file: str) -> Diagnostic:
    detail = f"changed since it was decided: {', '.join(topics)}\nreason: {plan.decisions.split.reason}"
    return diagnostic("MP412", detail, Location(file=file, key="split.reason"), severity=Severity.WARNING)
