"""`objective: step_time`: starting cuts, choice among climbs, and certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from megaplan.budget.fit import DOES_NOT_FIT
from megaplan.cost.replay import linked_orders
from megaplan.cost.times import ModelTimes, model_times
from megaplan.inventory.tensors import Inventory
from megaplan.layout.spans import Spans, cuts_of, spans_of
from megaplan.partition.best_cuts import balance
from megaplan.partition.bounds import StepBound
from megaplan.partition.certify import stack_of
from megaplan.partition.constraints import Constraints, constraints_of
from megaplan.partition.equal import equal_cuts
from megaplan.partition.memory import Memory
from megaplan.partition.paths import schedule_paths
from megaplan.partition.step_time import StepTimes, shorten
from megaplan.partition.values import Certificate, StackCosts
from megaplan.partition.weigh import Weighted, fitting_cuts, moved_by_memory
from megaplan.schedules import placement
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.times import MeasuredCosts


FAR, MOST_FAR = (1, 2, 4), 8
"""Positions by which cuts move when no move by one is shorter, and the number of slots up to which they do; with more slots, at most two.
"""
MAX_STAGE_WORK = 500_000
"""Work limit for budgets of one spec's cuts, in steps of about a microsecond; beyond it no further cuts are checked for memory."""


class Pipeline:
    """The step of a spec: its replay and its bound, computed on demand: a long schedule takes seconds, and costs need none."""

    def __init__(self, spec: Spec, inventory: Inventory, measured: MeasuredCosts | None = None) -> None:
        """Times are those of the costs file, or follow from the device's rates without one."""
        mesh, schedule = spec.mesh, spec.schedule
        self.times: ModelTimes = model_times(spec, inventory) if measured is None else measured.times
        self.costs = StackCosts(
            tuple(layer.total_ns for layer in self.times.layers), self.times.first.total_ns, self.times.last.total_ns, unit="ns"
        )
        self._where, self._rules = placement(schedule.kind), constraints_of(spec)
        self._orders = schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches

    @cached_property
    def step(self) -> StepTimes:
        """Replays of the schedule."""
        return StepTimes(self.times, linked_orders(*self._orders), schedule_paths(*self._orders))

    def certify(self, spans: Spans) -> Certificate:
        """The step time of cuts, compared with a bound for all cuts under the same constraints."""
        value = self.step.of(cuts_of(spans))
        bound = StepBound(self.times, self._rules, self._where, schedule_paths(*self._orders)).lower_bound(value, self._orders[-1])
        return Certificate("step_time", value, bound, self.costs.of_slots(spans), "ns", "step")


class Shortest(NamedTuple):
    """The result of several climbs.

    Attributes:
        cuts: The best cuts.
        refused: True if cuts were skipped because they do not fit.
    """

    cuts: tuple[int, ...]
    refused: bool


def shortest(
    pipeline: Pipeline, rules: Constraints, bottleneck: tuple[int, ...], baseline: tuple[int, ...] | None, memory: Memory | None
) -> Shortest:
    """The best of several climbs on the replayed step, improved by longer moves.

    Of equally good climbs the one with the fewest moved cuts continues, then the first in order.

    Args:
        pipeline: Pipeline whose step is minimised.
        rules: Constraints on cuts.
        bottleneck: Starting cuts that keep them and fit.
        baseline: Cuts to keep where that is free.
        memory: Budgets of the cuts; None to ignore memory.
    """
    costs, num_layers, num_slots = pipeline.costs, len(pipeline.costs.layers), len(bottleneck) + 1
    refused = False

    def fitting(cuts: tuple[int, ...]) -> bool:
        nonlocal refused
        if memory is None:
            return True
        found = memory.work < MAX_STAGE_WORK and max(memory.excesses(spans_of(cuts, num_layers))) <= 0
        refused = refused or not found
        return found

    def order(cuts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        moved = 0 if baseline is None else sum(cut != old for cut, old in zip(cuts, baseline, strict=True))
        return pipeline.step.of(cuts), moved, cuts

    others = [cuts for cuts in _starts(costs, num_slots, rules, baseline) if not rules.broken_by(cuts) and fitting(cuts)]
    reached = {shorten(pipeline.step, start, rules, num_layers, fitting) for start in dict.fromkeys((bottleneck, *others))}
    best = min(reached, key=order)
    places = FAR if num_slots <= MOST_FAR else FAR[:-1]
    return Shortest(shorten(pipeline.step, best, rules, num_layers, fitting, places), refused)


def step_time_cuts(spec: Spec, inventory: Inventory, measured: MeasuredCosts | None, baseline: tuple[int, ...] | None) -> Weighted:
    """The cuts with the shortest step found among those that fit; the closest to fitting if none do."""
    pipeline, rules = Pipeline(spec, inventory, measured), constraints_of(spec)
    num_layers, stack = len(inventory.layers), stack_of(spec, pipeline.costs, baseline)
    bottleneck = fitting_cuts(spec, inventory, stack, measured)
    if any(note.code == DOES_NOT_FIT for note in bottleneck.notes) or spec.mesh.num_slots == 1:
        return Weighted(bottleneck.cuts, partial(pipeline.certify, spans_of(bottleneck.cuts, num_layers)), bottleneck.notes)
    memory = Memory(spec, inventory, measured)
    best, refused = shortest(pipeline, rules, bottleneck.cuts, baseline, memory)
    found = Weighted(best, partial(pipeline.certify, spans_of(best, num_layers)))
    if not refused and not bottleneck.notes:
        return found
    balanced = stack.best()
    assert balanced is not None, "without limits there is a split"
    free = shortest(pipeline, rules, balanced.cuts, baseline, None).cuts
    there, here = pipeline.step.of(free), pipeline.step.of(best)
    if there >= here or max(memory.excesses(spans_of(free, num_layers))) <= 0:
        return found
    note = moved_by_memory(stack, memory, free, "have the shortest step that was found", f"step: {there:,} ns there, {here:,} here")
    return replace(found, notes=(note,))


def _starts(costs: StackCosts, num_slots: int, rules: Constraints, baseline: tuple[int, ...] | None) -> Sequence[tuple[int, ...]]:
    """Starting cuts: equal ones, the largest slot's optimum, the baseline."""
    largest_slot = balance(costs, num_slots, rules)
    assert largest_slot is not None, "without limits there is a split"
    found = [equal_cuts(len(costs.layers), num_slots), largest_slot.cuts]
    return found if baseline is None else [*found, baseline]
