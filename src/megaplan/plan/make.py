"""`make_plan`: a plan document from a spec, decided, estimated and digested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.partition.values import Cuts
from megaplan.plan.canonical import Json, dumps, normalise, normalise_object
from megaplan.plan.decide import decisions_record, split_record
from megaplan.plan.digests import model_digest, plan_digest
from megaplan.plan.document import FORMAT, FORMAT_MINOR, PlanDocument
from megaplan.plan.estimates import estimates_record
from megaplan.plan.inputs import inputs_record
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts


def make_plan(
    spec: Spec,
    baseline: PlanDocument | None = None,
    overrides: Sequence[str] = (),
    cuts: Cuts | None = None,
    costs: MeasuredCosts | None = None,
) -> PlanDocument:
    """Cut, estimate and digest.

    Args:
        spec: A checked spec, overrides applied.
        baseline: A plan whose cuts are kept if equally good. A manual split with the same spans, reason and protected invariants keeps
            its recorded facts, so that later changes still show as stale.
        overrides: The `KEY=VALUE` texts of `--set` that led to `spec`, recorded in the plan.
        cuts: Cuts, if they are decided already; else `choose_cuts` decides.
        costs: The costs file that decided `cuts`, or decides them; FLOPs by default.

    Raises:
        MegaplanError: No split is feasible, or the spec cannot be planned.
    """
    inventory = build_inventory(spec)
    if cuts is None:
        cuts = choose_cuts(spec, inventory, baseline=baseline.spans if baseline else None, measured=costs)
    split = split_record(cuts, _kept_basis(cuts, baseline), costs.digest if costs is not None else None)
    return _assembled(spec, inventory, cuts.spans, split, overrides)


def _assembled(spec: Spec, inventory: Inventory, spans: Spans, split: dict[str, Any], overrides: Sequence[str]) -> PlanDocument:
    """The document of decided spans; `split` records how they were decided."""
    letters = "".join(block.family for block in inventory.layers)
    layout, inputs = build_layout(spec, inventory, spans), inputs_record(spec)
    decisions = normalise_object(decisions_record(spec, letters, layout, split))
    document = {
        "format": FORMAT,
        "format_minor": FORMAT_MINOR,
        "digests": {"model": model_digest(spec, letters), "plan": plan_digest(inputs, decisions)},
        "overrides": list(overrides),
        "inputs": inputs,
        "decisions": decisions,
        "estimates": normalise(estimates_record(spec, inventory, layout)),
    }
    return PlanDocument.model_validate(document)


def replan(plan: PlanDocument, costs: MeasuredCosts | None = None) -> PlanDocument:
    """The plan of the same inputs, made today: the same text unless something changed.

    If that gives other cuts, the plan itself is the baseline, since it may have kept an earlier plan's cuts. The first attempt has no
    baseline, because a search for cuts that ends at its work limit gets further when it starts from earlier results.

    Without the plan's costs file its split cannot be decided again: the split is kept, and everything else is decided again.
    """
    if plan.decisions.split.costs is not None and costs is None:
        return _assembled(plan.spec, plan.inventory, plan.spans, plan.decisions.split.model_dump(mode="json"), plan.overrides)
    cuts = choose_cuts(plan.spec, plan.inventory, measured=costs)
    if cuts.spans != plan.spans:
        cuts = choose_cuts(plan.spec, plan.inventory, baseline=plan.spans, measured=costs)
    return make_plan(plan.spec, baseline=plan, overrides=plan.overrides, cuts=cuts, costs=costs)


def plan_text(plan: PlanDocument) -> str:
    """The canonical text of a plan file."""
    return dumps(normalise(plan.model_dump(mode="json")))


def write_plan(plan: PlanDocument, path: str | Path) -> None:
    """Write the canonical text to a file."""
    Path(path).write_text(plan_text(plan), encoding="utf-8")


def estimate_cuts(spec: Spec, spans: Spans) -> dict[str, Json]:
    """`estimates` of a spec cut at given spans.

    Raises:
        MegaplanError: The spans do not fit the spec.
    """
    inventory = build_inventory(spec)
    return normalise_object(estimates_record(spec, inventory, build_layout(spec, inventory, spans)))


def _kept_basis(cuts: Cuts, baseline: PlanDocument | None) -> dict[str, str] | None:
    """Recorded facts of the baseline's split, if this is that split: manual, and equal in every field."""
    if baseline is None or cuts.mode != "manual":
        return None
    split = baseline.decisions.split
    same = split.mode == "manual" and split.reason == cuts.reason and split.protects == cuts.protects and baseline.spans == cuts.spans
    return dict(split.decided_against) if same else None
