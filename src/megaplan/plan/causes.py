"""Causes of the change of each column (R-49): every changed input is applied to the first plan by itself, and estimated.

The effects of single changes need not sum to the whole difference, because changes interact (more experts and a larger EP degree).
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from megaplan.columns import Column
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.plan.diff import PlanDiff, ValueChange, column_totals, diff_plans
from megaplan.plan.document import Estimates, PlanDocument, SpanField
from megaplan.plan.inputs import spec_values
from megaplan.spec.models import Spec

CUTS = "cuts"
MAX_CHANGES = 16
"""Largest number of changed inputs with causes; more mean two different models."""

_WITHOUT_BYTES = {"name", "format", "split", "device", "serving"}
_HOST = "host"
_TOGETHER = {"model.pattern": "model.num_layers", "mesh.vpp": "mesh.pp", "schedule.kind": "mesh.pp"}


def diff_with_causes(before: PlanDocument, after: PlanDocument, tampered: tuple[tuple[str, Diagnostic], ...] = ()) -> PlanDiff:
    """`diff_plans`, with the causes of every column's change."""
    diff = diff_plans(before, after, tampered)
    if not diff.growth or tampered:
        return diff
    effects = dict(_effects(before, after, diff))
    growth = tuple(
        replace(item, causes=tuple((key, effect[item.column]) for key, effect in effects.items() if effect[item.column]))
        for item in diff.growth
    )
    return replace(diff, growth=growth)


def _effects(before: PlanDocument, after: PlanDocument, diff: PlanDiff) -> Iterator[tuple[str, dict[Column, int]]]:
    """Each change with the bytes that it alone adds to each column, over all ranks; changes that are invalid alone are omitted."""
    groups = _groups(diff)
    if len(groups) > MAX_CHANGES:
        return
    if len(groups) == 1:
        yield next(iter(groups)), {item.column: item.after - item.before for item in diff.growth} | _zero(diff)
        return
    base = _totals(before.spec, before.spans)
    for name, changes in groups.items():
        spec = _changed(before, changes, after)
        spans = after.spans if name == CUTS else before.spans
        totals = _totals(spec, spans) if spec else None
        if totals is not None and base is not None:
            yield name, {column: totals[column] - base[column] for column in Column}


def _zero(diff: PlanDiff) -> dict[Column, int]:
    changed = {item.column for item in diff.growth}
    return {column: 0 for column in Column if column not in changed}


def _groups(diff: PlanDiff) -> dict[str, list[ValueChange]]:
    """Changed inputs by their reported name; inputs that only make sense together are one group."""
    groups: dict[str, list[ValueChange]] = {}
    keys = {change.key for change in diff.inputs}
    for change in diff.inputs:
        section = change.key.partition(".")[0]
        if section in _WITHOUT_BYTES:
            continue
        if section == _HOST and "host.name" in keys:  # keys of another host are valid only with its name
            groups.setdefault(_HOST, []).append(change)
            continue
        partner = _TOGETHER.get(change.key, change.key)
        groups.setdefault(partner if partner in keys else change.key, []).append(change)
    if diff.moves:
        groups[CUTS] = []
    return groups


def _changed(plan: PlanDocument, changes: list[ValueChange], after: PlanDocument) -> Spec | None:
    """The plan's spec with the changes applied; None if the spec is invalid."""
    inputs: dict[str, Any] = copy.deepcopy(plan.inputs)
    for change in changes:
        if change.key == "host.name":
            inputs[_HOST] = copy.deepcopy(after.inputs[_HOST])
        if change.key.partition(".")[0] == _HOST and any(other.key == "host.name" for other in changes):
            continue
        *path, last = change.key.split(".")
        section = inputs
        for step in path:
            section = section[step]
        section[last] = change.after
    try:
        return Spec.model_validate(spec_values(inputs))
    except ValidationError:
        return None


def _totals(spec: Spec, spans: tuple[SpanField, ...]) -> dict[Column, int] | None:
    """Bytes of each column over all ranks; None if the spec breaks a rule or the spans do not fit it."""
    from megaplan.plan.make import estimate_cuts  # noqa: PLC0415  (a diff of equal plans needs no estimate)
    from megaplan.spec.rules import check_rules  # noqa: PLC0415

    if any(found.severity is Severity.ERROR for found in check_rules(spec, lambda key: Location(key=key))):
        return None
    try:
        return column_totals(Estimates.model_validate(estimate_cuts(spec, spans)))
    except MegaplanError:
        return None
