"""`objective: step_time`: what to start from, which climb was best, and the certificate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaplan.budget.fit import DOES_NOT_FIT
from megaplan.cost.times import ModelTimes, model_times
from megaplan.inventory.tensors import Inventory
from megaplan.layout.spans import Spans, cuts_of, spans_of
from megaplan.partition.certify import stack_of
from megaplan.partition.constraints import Constraints, constraints_of
from megaplan.partition.equal import equal_cuts
from megaplan.partition.memory import Memory
from megaplan.partition.paths import paths_of
from megaplan.partition.step_bound import StepBound
from megaplan.partition.step_time import StepTime, climb
from megaplan.partition.values import Certificate, StackCosts
from megaplan.partition.weigh import Weighted, fitting_cuts
from megaplan.partition.weighted import balance
from megaplan.schedules import SPLIT_BACKWARD, actions, placement
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.times import MeasuredCosts


class Pipeline:
    """The step of a spec: its replay and its bound."""

    def __init__(self, spec: Spec, inventory: Inventory, measured: MeasuredCosts | None = None) -> None:
        """Times are those of the costs file, or of the device's rates without one."""
        mesh, schedule = spec.mesh, spec.schedule
        self.times: ModelTimes = model_times(spec, inventory) if measured is None else measured.times
        self.costs = StackCosts(
            tuple(layer.total_ns for layer in self.times.layers), self.times.first.total_ns, self.times.last.total_ns, unit="ns"
        )
        self._where, self._rules = placement(schedule.kind), constraints_of(spec)
        self._num_microbatches = schedule.num_microbatches
        orders = actions(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
        self._paths = paths_of(orders, self._where, mesh.vpp, whole=schedule.kind not in SPLIT_BACKWARD)
        self.step = StepTime(self.times, orders, self._paths)

    def certify(self, spans: Spans) -> Certificate:
        """The step time of cuts against a bound for all cuts under the same constraints."""
        value = self.step.of(cuts_of(spans))
        bound = StepBound(self.times, self._rules, self._where, self._paths).lower_bound(value, self._num_microbatches)
        return Certificate("step_time", value, bound, self.costs.of_slots(spans), "ns", "step")


def step_time_cuts(spec: Spec, inventory: Inventory, measured: MeasuredCosts | None, baseline: tuple[int, ...] | None) -> Weighted:
    """The best of several climbs on the replayed step; among equally good ones the fewest cuts moved, then the first in order."""
    pipeline, rules = Pipeline(spec, inventory, measured), constraints_of(spec)
    num_layers, num_slots = len(inventory.layers), spec.mesh.pp * spec.mesh.vpp
    bottleneck = fitting_cuts(spec, inventory, stack_of(spec, pipeline.costs, baseline), measured)
    memory = Memory(spec, inventory, measured)

    def fits(cuts: tuple[int, ...]) -> bool:
        return max(memory.excesses(spans_of(cuts, num_layers))) <= 0

    if any(note.code == DOES_NOT_FIT for note in bottleneck.notes) or num_slots == 1:
        return Weighted(bottleneck.cuts, pipeline.certify(spans_of(bottleneck.cuts, num_layers)), bottleneck.notes)
    others = [cuts for cuts in _starts(pipeline.costs, num_slots, rules, baseline) if not rules.broken_by(cuts) and fits(cuts)]
    positions, pins = rules.allowed_cuts(num_layers), frozenset(rules.pin)
    reached = {climb(pipeline.step, start, positions, pins, fits) for start in (bottleneck.cuts, *others)}

    def order(cuts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        moved = 0 if baseline is None else sum(cut != old for cut, old in zip(cuts, baseline, strict=True))
        return pipeline.step.of(cuts), moved, cuts

    best = min(reached, key=order)
    return Weighted(best, pipeline.certify(spans_of(best, num_layers)))


def _starts(costs: StackCosts, num_slots: int, rules: Constraints, baseline: tuple[int, ...] | None) -> Sequence[tuple[int, ...]]:
    """Equal cuts, the largest slot's optimum, the baseline."""
    largest_slot = balance(costs, num_slots, rules)
    assert largest_slot is not None, "without limits there is a split"
    found = [equal_cuts(len(costs.layers), num_slots), largest_slot.cuts]
    return found if baseline is None else [*found, baseline]
