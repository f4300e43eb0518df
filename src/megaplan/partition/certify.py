"""Certificates of cuts that were decided elsewhere: their distance from the best under the same constraints."""

from __future__ import annotations

from itertools import product

from megaplan.layout.spans import Spans
from megaplan.partition.best_cuts import balance
from megaplan.partition.constraints import constraints_of
from megaplan.partition.stack import Stack
from megaplan.partition.values import Certificate, StackCosts, bottleneck
from megaplan.schedules import placement
from megaplan.spec.models import Spec


def stack_of(spec: Spec, costs: StackCosts, baseline: tuple[int, ...] | None = None) -> Stack:
    """Layer costs, placement and constraints of a spec, without memory."""
    mesh = spec.mesh
    return Stack(costs, constraints_of(spec), placement(spec.schedule.kind), mesh.pp, mesh.vpp, baseline)


def certify(stack: Stack, spans: Spans, lower_bound: int | None = None) -> Certificate:
    """The bottleneck of cuts, compared with the best one.

    Args:
        stack: Layer costs, placement and constraints.
        spans: Spans of the cuts.
        lower_bound: Lower bound over all cuts under the same constraints; by default that of the best cuts, without memory.
    """
    costs = stack.costs.of_slots(spans)
    if lower_bound is None:
        lower_bound = _least(stack, spans)
    measures, value = bottleneck(stack.where, costs)
    return Certificate("bottleneck", value, lower_bound, costs, stack.costs.unit, measures)


def _least(stack: Stack, spans: Spans) -> int:
    """The smallest bottleneck of cuts that leave no slot empty except those that `spans` leaves empty.

    A host may give the first slot only the embedding, or the last only the head. An empty slot between two others reduces no cost.
    """
    empty = [start == stop for start, stop in spans]
    if not any(empty):
        best = stack.best()
        assert best is not None, "without limits there is a split"
        return best.value
    found, between = [], sum(empty[1:-1])
    for first, last in product({False, empty[0]}, {False, empty[-1]}):
        alone = first * stack.costs.first, last * stack.costs.last
        costs = stack.costs._replace(first=stack.costs.first - alone[0], last=stack.costs.last - alone[1])
        filled = len(spans) - first - last
        num_slots = [
            count for count in range(filled, max(filled - between, 1) - 1, -1) if not stack.rules.problems(stack.num_layers, count)
        ]
        if num_slots:
            best = balance(costs, num_slots[0], stack.rules)
            assert best is not None, "without limits there is a split"
            found.append(max(best.value, *alone))
    return min(found)
