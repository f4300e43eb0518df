"""The parts of a job in addition to memory and step: traffic between ranks, the whole run, and the post-training plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megaplan.errors import MegaplanError
from megaplan.layout.traffic import AxisTraffic, traffic_of

if TYPE_CHECKING:
    from megaplan.budget.values import Budget
    from megaplan.goodput.values import RunEstimate
    from megaplan.inventory.tensors import Inventory
    from megaplan.layout.ranks import Layout
    from megaplan.layout.step_time import PlannedTime
    from megaplan.post_training.values import RlEstimate
    from megaplan.spec.models import Spec

Made = TypeVar("Made")


class JobParts(NamedTuple):
    """Parts of a job.

    Attributes:
        traffic: Bytes that a rank sends in a step, by axis and link.
        run: The whole run, or the reason (text) that none is stated; None for a spec without the section `run`.
        post_training: The post-training plan or the reason that none is stated; None without the section `post_training`.
    """

    traffic: tuple[AxisTraffic, ...]
    run: RunEstimate | str | None
    post_training: RlEstimate | str | None

    def as_document(self) -> dict[str, Any]:
        """Plain values; `run` and `post_training` are the documents of `megaplan run --json` and `megaplan rl --json`."""
        run, plan = (
            {"reason": part} if isinstance(part, str) else None if part is None else asdict(part) for part in (self.run, self.post_training)
        )
        return {"traffic": [row._asdict() for row in self.traffic], "run": run, "post_training": plan}


def parts_of(spec: Spec, inventory: Inventory, layout: Layout, time: PlannedTime | str, budget: Budget | None = None) -> JobParts:
    """The parts of a job.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
        time: Time of its step.
        budget: Budget of the layout; if None, it is built when needed.
    """
    spans = layout.spans
    return JobParts(traffic_of(spec, inventory, spans), _run(spec, inventory, layout, time, budget), _post_training(spec, inventory, spans))


def _run(spec: Spec, inventory: Inventory, layout: Layout, time: PlannedTime | str, budget: Budget | None) -> RunEstimate | str | None:
    if spec.run is None:
        return None
    from megaplan.budget.peaks import build_budget  # noqa: PLC0415  (most jobs have no such section)
    from megaplan.goodput.estimate import run_estimate  # noqa: PLC0415

    held = build_budget(spec, inventory, layout) if budget is None else budget
    return _made(lambda: run_estimate(spec, inventory, layout, held, time))


def _post_training(spec: Spec, inventory: Inventory, spans: tuple[tuple[int, int], ...]) -> RlEstimate | str | None:
    if spec.post_training is None:
        return None
    from megaplan.post_training.estimate import rl_estimate  # noqa: PLC0415

    return _made(lambda: rl_estimate(spec, inventory, spans))


def _made(make: Callable[[], Made]) -> Made | str:
    try:
        return make()
    except MegaplanError as error:
        return "; ".join(found.detail or found.summary for found in error.diagnostics)
