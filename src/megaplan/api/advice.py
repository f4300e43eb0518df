"""Diagnostics for jobs that do not fit, and the changes that help, priced with the cuts that a command would choose for the changed job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megaplan.advice.faster import FASTER_WORK, Advice, faster
from megaplan.advice.fit import misfit
from megaplan.advice.pricing import Pricer, Work
from megaplan.api.load import read_costs_of
from megaplan.errors import Diagnostic, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.step_time import NS, PlannedTime
from megaplan.spec.models import Spec
from megaplan.spec.read import STDIN

if TYPE_CHECKING:
    from megaplan.api.load import LoadedJob
    from megaplan.budget.values import Budget
    from megaplan.cost.values import MeasuredCosts
    from megaplan.layout.build import Spans
    from megaplan.layout.ranks import Layout


def advised(
    job: LoadedJob,
    layout: Layout,
    budget: Budget,
    of_cuts: Sequence[Diagnostic],
    *,
    baseline: Spans | None = None,
    severity: Severity = Severity.WARNING,
) -> Diagnostic:
    """Returns MP501 for a job that does not fit.

    Args:
        job: The job.
        layout: Layout under the chosen cuts.
        budget: Budget of that layout.
        of_cuts: Diagnostics from choosing the cuts.
        baseline: Cuts of the plan, which a split prefers to equally good ones.
        severity: Severity of the diagnostic.
    """
    kept = job.spans if job.plan is not None else None
    return misfit((job.spec, job.inventory, layout), budget, Pricer(kept, baseline, _measured(job)), of_cuts, severity, job.sized)


def faster_changes(job: LoadedJob, time: PlannedTime) -> Advice:
    """Changes that shorten the step of a job that fits, fastest first.

    Args:
        job: The job.
        time: Time of its step.
    """
    kept = job.spans if job.plan is not None else None
    pricer = Pricer(kept, None, _measured(job), Work(FASTER_WORK))
    return Advice(faster(job.spec, round(time.seconds / NS), pricer))


def _measured(job: LoadedJob) -> Callable[[Spec, Inventory], MeasuredCosts | None]:
    """The job's costs file for a changed spec; transfer times that it does not state follow the mesh."""

    def measured(spec: Spec, inventory: Inventory) -> MeasuredCosts | None:
        if job.costs is None or job.costs_path is None or os.fspath(job.costs_path) == STDIN:
            return job.costs
        return read_costs_of(job.costs_path, job.name, spec, inventory)

    return measured
