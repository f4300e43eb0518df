"""Rules of schedules: stages and microbatches (R-26, R-27)."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.schedules.registry import schedule_problems
from megaplan.spec.context import Checked
from megaplan.spec.pattern import has_boundaries


def schedule_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP212 and MP311 … MP313."""
    spec = checked.spec
    mesh, schedule, layers = spec.mesh, spec.schedule, spec.model.num_layers
    slots = mesh.num_slots
    if slots > layers and not (spec.host.kind.empty_slots and (has_boundaries(spec.model.pattern) or spec.split.spans)):
        detail = f"mesh.pp · mesh.vpp = {mesh.pp} · {mesh.vpp} = {slots} slots, model.num_layers = {layers}, and {slots} > {layers}"
        yield checked.error("MP212", detail, "mesh.pp", f"use at most {layers} slots")
    for problem in schedule_problems(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches, planned=True):
        yield checked.error(problem.code, problem.detail, problem.key, *problem.hints)
