"""The whole run and the post-training plan of a job, as the documents of `megaplan run --json` and `megaplan rl --json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megaplan.errors import MegaplanError

if TYPE_CHECKING:
    from megaplan.api.load import LoadedJob
    from megaplan.budget.values import Budget
    from megaplan.goodput.values import RunEstimate
    from megaplan.layout.step_time import PlannedTime
    from megaplan.post_training.values import RlEstimate

Part = dict[str, Any]
"""The document of a part of a job, or its `reason` that it has none."""


def run_part(job: LoadedJob, budget: Budget, time: PlannedTime | str) -> Part | None:
    """The whole run; None for a spec without the section `run`."""
    if job.spec.run is None:
        return None
    from megaplan.goodput.estimate import run_estimate  # noqa: PLC0415  (most jobs have no such section)

    return _part(lambda: run_estimate(job.spec, job.inventory, job.layout, budget, time))


def post_training_part(job: LoadedJob) -> Part | None:
    """The post-training plan; None for a spec without the section `post_training`."""
    if job.spec.post_training is None:
        return None
    from megaplan.post_training.estimate import rl_estimate  # noqa: PLC0415

    return _part(lambda: rl_estimate(job.spec, job.inventory, job.spans))


def _part(make: Callable[[], RunEstimate | RlEstimate]) -> Part:
    try:
        return asdict(make())
    except MegaplanError as error:
        return {"reason": "; ".join(found.detail or found.summary for found in error.diagnostics)}
