"""`choose_cuts`: the cuts by the spec's `split.mode`, their certificate and warnings.

Choice of mode (R-21): `equal` if the model is homogeneous, `weighted` if families differ in cost, `manual` if topology or ownership
matters more than cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, cuts_of, num_filled, spans_of
from megaplan.partition.constraints import boundary_warnings, constraints_of
from megaplan.partition.invariants import invariant_digests
from megaplan.partition.manual import manual_problems, manual_spans
from megaplan.partition.stack import certify, stack_of
from megaplan.partition.values import Certificate, Cuts, Mode, StackCosts, equal_cuts, objective_notes, objective_of, stack_costs
from megaplan.partition.weigh import Weighted, fitting_cuts
from megaplan.schedules import placement, schedule_problems, slot_owner
from megaplan.spec.models import Spec
from megaplan.spec.pattern import parse_pattern

if TYPE_CHECKING:
    from megaplan.cost.values import MeasuredCosts


def choose_cuts(
    spec: Spec,
    inventory: Inventory,
    baseline: Spans | None = None,
    costs: StackCosts | None = None,
    measured: MeasuredCosts | None = None,
) -> Cuts:
    """Decide the split.

    Args:
        spec: A checked spec. A pattern with `|` is a manual split in every mode.
        inventory: Parameter tensors of the spec.
        baseline: Spans of an earlier plan; among equally good weighted cuts, those that move the fewest of its boundaries are chosen.
        costs: Layer costs for objective bottleneck; by default those of the costs file, else FLOPs per token.
        measured: A costs file.

    Returns:
        The cuts. Their certificate compares them with the best cuts under the same constraints, in every mode. If no weighted split fits
        the memory: the closest cuts, with the warning MP501.

    Raises:
        MegaplanError: The schedule cannot run on these degrees (MP310 … MP313, R-26), or the split section contradicts itself or leaves no
            split (MP321 … MP331, MP335).
    """
    mesh, split, rules = spec.mesh, spec.split, constraints_of(spec)
    num_layers, num_slots = len(inventory.layers), mesh.pp * mesh.vpp
    pattern_spans = parse_pattern(spec.model.pattern, spec.model.num_layers).spans
    mode: Mode = "manual" if pattern_spans is not None else split.mode
    few = spec.host.kind.few_microbatches
    impossible = schedule_problems(spec.schedule.kind, mesh.pp, mesh.vpp, spec.schedule.num_microbatches, few=few)
    found = [problem.diagnostic() for problem in impossible]
    found += rules.problems(num_layers, max(1, num_filled(manual_spans(spec, pattern_spans))) if mode == "manual" else num_slots)
    if mode == "manual":
        found += manual_problems(spec, pattern_spans)
    if spec.pools and measured is not None:
        found.append(costs_of_pools())
    if found:
        raise MegaplanError(found)
    notes = [_other_baseline(baseline, num_slots)] if baseline is not None and len(baseline) != num_slots else []
    kept = cuts_of(baseline) if baseline is not None and not notes else None
    weights = costs or stack_costs(spec, inventory, measured)
    if mode == "weighted":
        weighted = _weighted_cuts(spec, inventory, weights, measured, kept)
        found_cuts = _cuts(spec, inventory, weights, mode, spans_of(weighted.cuts, num_layers), weighted.certify)
        return replace(found_cuts, diagnostics=(*notes, *objective_notes(spec), *weighted.notes, *found_cuts.diagnostics))
    if mode == "manual":
        spans = manual_spans(spec, pattern_spans)
    else:
        spans = spans_of(equal_cuts(num_layers, num_slots, spec.host.block_layers), num_layers)
        if broken := rules.broken_by(cuts_of(spans)):
            location, hints = Location(key="split.mode"), ("--set split.mode=weighted",)
            raise MegaplanError([diagnostic("MP335", detail, location, hints) for detail in broken])
    found_cuts = _cuts(spec, inventory, weights, mode, spans, _certifying(spec, inventory, weights, mode, spans))
    return replace(found_cuts, diagnostics=(*notes, *found_cuts.diagnostics))


def costs_of_pools() -> Diagnostic:
    """Refuses a costs file for stages on several devices (MP510)."""
    return diagnostic("MP510", "a costs file has the times of one device", Location(key="pools"), ("--set 'pools=[]'",))


def keep_cuts(spec: Spec, inventory: Inventory, spans: Spans) -> Cuts:
    """Existing cuts, whatever the spec would decide, with their certificate under today's costs.

    Raises:
        MegaplanError: The same as for `choose_cuts`, except for memory.
    """
    constraints_of(spec).check(len(inventory.layers), num_filled(spans))
    mode: Mode = "manual" if parse_pattern(spec.model.pattern, spec.model.num_layers).spans is not None else spec.split.mode
    weights = stack_costs(spec, inventory)
    return _cuts(spec, inventory, weights, mode, spans, _certifying(spec, inventory, weights, mode, spans))


def _certifying(spec: Spec, inventory: Inventory, weights: StackCosts, mode: Mode, spans: Spans) -> Callable[[], Certificate]:
    """The certificate of given cuts.

    It is by the step if weighted cuts minimise the step, or if layers have different costs on several devices.
    """
    if spec.pools or (mode == "weighted" and objective_of(spec) == "step_time"):
        from megaplan.partition.step import Pipeline  # noqa: PLC0415  (bottleneck needs no times)

        return partial(Pipeline(spec, inventory).certify, spans)
    return partial(certify, stack_of(spec, weights), spans)


def _cuts(spec: Spec, inventory: Inventory, weights: StackCosts, mode: Mode, spans: Spans, certify: Callable[[], Certificate]) -> Cuts:
    where, split = placement(spec.schedule.kind), spec.split
    owners = [slot_owner(where, slot, spec.mesh.pp)[0] for slot in range(len(spans))]
    is_manual = mode == "manual"
    return Cuts(
        spans=spans,
        mode=mode,
        objective=objective_of(spec) if mode == "weighted" else None,
        certify=certify,
        reason=split.reason if is_manual else None,
        protects=split.protects if is_manual else (),
        decided_against=invariant_digests(spec, inventory, weights) if is_manual else {},
        diagnostics=tuple(boundary_warnings(inventory, cuts_of(spans), owners, constraints_of(spec))),
    )


def _other_baseline(baseline: Spans, num_slots: int) -> Diagnostic:
    detail = f"the baseline has {len(baseline)} slots, this spec {num_slots}: ties are broken without it, and more cuts may move"
    return diagnostic("MP339", detail, severity=Severity.WARNING)


def _weighted_cuts(
    spec: Spec, inventory: Inventory, costs: StackCosts, measured: MeasuredCosts | None, baseline: tuple[int, ...] | None
) -> Weighted:
    """The best cuts for the spec's objective that fit.

    Args:
        spec: A checked spec whose constraints leave a split.
        inventory: Parameter tensors of the spec.
        costs: Layer costs for objective bottleneck.
        measured: A costs file.
        baseline: Cuts to keep if equally good.
    """
    if objective_of(spec) == "step_time":
        from megaplan.partition.step import step_time_cuts  # noqa: PLC0415  (bottleneck needs no times)

        return step_time_cuts(spec, inventory, measured, baseline)
    stack = stack_of(spec, costs, baseline)
    return fitting_cuts(spec, inventory, stack, measured)
