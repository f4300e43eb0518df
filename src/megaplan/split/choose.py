"""`choose_cuts`: the mode a spec asks for, its cuts, their certificate and warnings.

Order of choice (R-21): `equal` when the model is homogeneous, `weighted` when families differ in cost, `manual` when topology or ownership
matters more than cost.
"""

from __future__ import annotations

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.spans import Spans, cuts_of, spans_of
from megaplan.schedule import placement, schedule_problems, slot_owner
from megaplan.spec.models import Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.split.boundaries import boundary_warnings
from megaplan.split.constraints import constraints_of
from megaplan.split.costs import stack_costs
from megaplan.split.equal import equal_cuts
from megaplan.split.invariants import invariant_digests
from megaplan.split.manual import manual_problems, manual_spans
from megaplan.split.values import Certificate, Cuts, Mode, StackCosts
from megaplan.split.weighted import balance


def choose_cuts(spec: Spec, inventory: Inventory, baseline: Spans | None = None, costs: StackCosts | None = None) -> Cuts:
    """Decide the split.

    Args:
        spec: A checked spec. A pattern with `|` is a manual split, whatever the mode.
        inventory: Its parameter tensors.
        baseline: Spans of an earlier plan; among equally good weighted cuts, those that move the fewest of its boundaries win.
        costs: What layers cost; FLOPs per token if not given.

    Returns:
        The cuts. Their certificate compares them with the best cuts under the same constraints, in every mode.

    Raises:
        MegaplanError: The schedule cannot run on these degrees (MP310 … MP313, R-26), the split section contradicts itself or leaves no
            split (MP321 … MP331, MP335), or the objective is not offered yet (MP334).
    """
    mesh, split, rules = spec.mesh, spec.split, constraints_of(spec.split)
    num_layers, num_slots = len(inventory.layers), mesh.pp * mesh.vpp
    pattern_spans = parse_pattern(spec.model.pattern, spec.model.num_layers).spans
    mode: Mode = "manual" if pattern_spans is not None else split.mode
    found = schedule_problems(spec.schedule.kind, mesh.pp, mesh.vpp, spec.schedule.num_microbatches)
    found += rules.problems(num_layers, num_slots)
    if mode == "manual":
        found += manual_problems(spec, pattern_spans)
    if mode == "weighted" and split.objective != "bottleneck":
        hint = "--set split.objective=bottleneck"
        found.append(_problem("MP334", f"split.objective = {split.objective}", "split.objective", hint))
    if found:
        raise MegaplanError(found)
    warnings = [_other_baseline(baseline, num_slots)] if baseline is not None and len(baseline) != num_slots else []
    kept = cuts_of(baseline) if baseline is not None and not warnings else None
    weights = costs or stack_costs(spec, inventory)
    best = balance(weights, num_slots, rules, baseline=kept if mode == "weighted" else None)
    match mode:
        case "manual":
            spans = manual_spans(spec, pattern_spans)
        case "equal":
            spans = spans_of(equal_cuts(num_layers, num_slots), num_layers)
            if broken := rules.broken_by(cuts_of(spans)):
                raise MegaplanError([_problem("MP335", detail, "split.mode", "--set split.mode=weighted") for detail in broken])
        case "weighted":
            spans = spans_of(best.cuts, num_layers)
    where = placement(spec.schedule.kind)
    owners = [slot_owner(where, slot, mesh.pp)[0] for slot in range(num_slots)]
    slot_costs = weights.of_slots(spans)
    is_manual = mode == "manual"
    return Cuts(
        spans=spans,
        mode=mode,
        objective=split.objective if mode == "weighted" else None,
        certificate=Certificate("bottleneck", max(slot_costs), best.value, slot_costs, weights.unit),
        reason=split.reason if is_manual else None,
        protects=split.protects if is_manual else (),
        decided_against=invariant_digests(spec, inventory, weights) if is_manual else {},
        diagnostics=(*warnings, *boundary_warnings(inventory, cuts_of(spans), owners, rules)),
    )


def _other_baseline(baseline: Spans, num_slots: int) -> Diagnostic:
    detail = f"the baseline has {len(baseline)} slots, this spec {num_slots}: ties are broken without it, and more cuts may move"
    return diagnostic("MP339", detail, severity=Severity.WARNING)


def _problem(code: str, detail: str, key: str, hint: str) -> Diagnostic:
    return diagnostic(code, detail, Location(key=key), (hint,))
