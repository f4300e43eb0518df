"""Certificates of cuts that were decided elsewhere: how far they are from the best under the same constraints."""

from __future__ import annotations

from megaplan.layout.spans import Spans
from megaplan.partition.constraints import constraints_of
from megaplan.partition.stack import Stack
from megaplan.partition.values import Certificate, StackCosts, bottleneck
from megaplan.schedules import placement
from megaplan.spec.models import Spec


def stack_of(spec: Spec, costs: StackCosts, baseline: tuple[int, ...] | None = None) -> Stack:
    """What a spec balances, memory aside."""
    mesh = spec.mesh
    return Stack(costs, constraints_of(spec), placement(spec.schedule.kind), mesh.pp, mesh.vpp, baseline)


def certify(stack: Stack, spans: Spans, lower_bound: int | None = None) -> Certificate:
    """The bottleneck of cuts against the best one.

    Args:
        stack: What is balanced.
        spans: The cuts' slots.
        lower_bound: No cuts under the same constraints are below it; that of the best cuts, memory aside, if not given.
    """
    costs = stack.costs.of_slots(spans)
    if lower_bound is None:
        best = stack.best()
        assert best is not None, "without limits there is a split"
        lower_bound = best.value
    measures, value = bottleneck(stack.where, costs)
    return Certificate("bottleneck", value, lower_bound, costs, stack.costs.unit, measures)
