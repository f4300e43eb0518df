"""The clock of hosts without fitted constants: megarun's step, and bounds on it over all cuts."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from megaplan.cost.rates import Rates, rates_of
from megaplan.cost.replay import Change, ReplayTimer, Sums, kept, policy_of
from megaplan.exploration.clock import CHANGES, SKEW, StepOf, Terms
from megaplan.exploration.space import UNSCHEDULED
from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.families.registry import FAMILIES
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.partition.bounds import at_slot, filled, least_on_slots, mean_path, packed
from megaplan.partition.constraints import constraints_of
from megaplan.partition.limits import layer_weight
from megaplan.partition.values import StackCosts, time_costs
from megaplan.spec.models import Spec

WHOLE = ("1f1b", "gpipe")
"""Schedules with one slot per rank and whole backwards."""


class ReplayClock:
    """`megaplan.cost.replay` on many layouts."""

    basis = "replay of the schedule with layer times from the device's rates; data parallelism modelled; uncalibrated"
    knows_schedules = True

    def __init__(self, inventory: Inventory, spec: Spec, copies: int = 1) -> None:
        """`spec` is one of the timed specs, which differ in the varied keys of a search; `copies` as for `clock_of`."""
        self._copies = copies
        self._timer = ReplayTimer(inventory, spec)
        self._least: dict[tuple[object, ...], int] = {}
        self._costs: dict[tuple[object, ...], StackCosts] = {}

    def bound_ns(self, spec: Spec) -> int:
        """The busiest rank runs at least an equal share of the layers, or the largest layer, for every microbatch of its copy.

        Pairs in turns may hide exchanges, except of a single layer: its forward and backward are never in one pair.
        """
        sums = self._timer.sums(spec)
        mesh, count = spec.mesh, spec.schedule.microbatches_per_update
        copies = self._copies if spec.schedule.kind == UNSCHEDULED[0] else spec.num_copies
        step = max(count * -(-sums.computing // mesh.pp), count // copies * sums.largest, sums.chain)
        if mesh.pp > 1 and spec.schedule.kind in WHOLE:
            step = max(step, filled(sums.total, mesh.pp, count))
        return step + self._timer.outside_layers(spec, sums)

    def bound_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """See `bound_ns`."""
        return self.bound_ns(spec_of(layout, policy))

    def tight_bound_ns(self, spec: Spec) -> int:
        """A bound from a mean of the paths through the schedule; for 1F1B and GPipe also from the fact that layers are indivisible."""
        timer, mesh, schedule = self._timer, spec.mesh, spec.schedule
        sums: Sums = timer.sums(spec)
        if mesh.pp == 1:
            return schedule.microbatches_per_update * sums.total + timer.outside_layers(spec, sums)
        key = (schedule.kind, mesh.pp, mesh.vpp, schedule.microbatches_per_update, timer.work_key(spec))
        found = self._least.get(key)
        if found is None:
            found = kept(self._least)[key] = max(self._on_paths(spec, sums), self._on_ranks(spec))
        return found + timer.outside_layers(spec, sums)

    def _on_paths(self, spec: Spec, sums: Sums) -> int:
        """The mean of the paths, with every layer on the slot where it adds the least."""
        timer, mesh, schedule = self._timer, spec.mesh, spec.schedule
        numbers, turns = mean_path(schedule.kind, mesh.pp, mesh.vpp, schedule.microbatches_per_update, turns=spec.interleaves_pairs)
        last = timer.inventory.layers[-1]
        found = (
            at_slot(numbers, 0, sums.first)
            + at_slot(numbers, -1, sums.last)
            + least_on_slots(numbers, timer.layer(spec, last, "none", scaled=timer.scaled[-1]))
        )
        for block, scaled, often in timer.makes:
            found += often * least_on_slots(numbers, timer.layer(spec, block, policy_of(spec, block.family), scaled=scaled))
        return -(-found // turns)

    def _on_ranks(self, spec: Spec) -> int:
        """The bound of `packed`, for a schedule with one slot per rank and whole backwards."""
        if spec.schedule.kind not in WHOLE:
            return 0
        costs, constraints = self.costs(spec), constraints_of(spec)
        before = layer_weight(costs.layers, costs.first, costs.last).up
        num_layers = len(costs.layers)
        edges = (0, *constraints.allowed_cuts(num_layers), num_layers)
        hop = self._timer.times(spec).boundary_ns
        return packed([before[edge] for edge in edges], spec.mesh.pp, spec.schedule.microbatches_per_update, hop)

    def costs(self, spec: Spec) -> StackCosts:
        """F + I + W, without exchanges that pairs in turns may hide."""
        key = self._timer.work_key(spec)
        found = self._costs.get(key)
        if found is None:
            found = kept(self._costs)[key] = time_costs((self._timer.times(spec),))
        return found

    def most_cost(self, spec: Spec, limit_ns: int) -> int:
        """The busiest part runs every microbatch, or every one of its copy of the model."""
        outside = self._timer.outside_layers(spec, self._timer.sums(spec))
        return (limit_ns - outside) // (spec.schedule.microbatches_per_update // spec.num_copies)

    def step_ns(self, spec: Spec, spans: Spans) -> int:
        """The step, as `planned_time` computes it."""
        return self._timer.step_ns(spec, spans)

    def variants(self, specs: Sequence[Spec]) -> Iterator[tuple[str, StepOf]]:
        """Changes of each share of a peak, rounded to a percent, of launches, latencies and recurrent steps; and routing with `SKEW`."""
        inventory, spec = self._timer.inventory, specs[0]
        letters = {block.family for block in inventory.layers}
        for name, each in changes_of(rates_of(spec), letters):
            yield name, ReplayTimer(inventory, spec, each).step_ns
        moe = spec.model.moe
        if moe is not None and "E" in letters and any(each.mesh.ep > 1 for each in specs):
            update = {"model": spec.model.model_copy(update={"moe": moe.model_copy(update={"routing_skew": SKEW})})}
            timer = ReplayTimer(build_inventory(spec.model_copy(update=update)), spec.model_copy(update=update))
            yield f"routing skew {SKEW:g}", lambda each, spans: timer.step_ns(each.model_copy(update=update), spans)

    def terms(self, spec: Spec, spans: Spans) -> Terms:
        """Terms of the step, as `planned_time` computes them."""
        return self._timer.terms(spec, spans)


def changes_of(rates: Rates, letters: AbstractSet[str]) -> Iterator[tuple[str, Change]]:
    """Changes of one efficiency each, with their names; `letters` are the families of the model."""
    parts = [part for part in rates.percent if part not in FAMILIES or part in letters]
    yield from ((f"{part} {text}", partial(_with_share, part, percent)) for part in parts for text, percent in CHANGES)
    for field in ("launch_ns", "latency_ns", "step_ns"):
        yield from ((f"{field.removesuffix('_ns')} {text}", partial(_with_field, field, percent)) for text, percent in CHANGES)


def _with_share(part: str, percent: int, rates: Rates) -> Rates:
    """A spec with one percentage changed."""
    return replace(rates, percent=rates.percent | {part: max(1, round(rates.percent[part] * percent / 100))})


def _with_field(field: str, percent: int, rates: Rates) -> Rates:
    """A spec with one time changed."""
    return replace(rates, **{field: getattr(rates, field) * percent // 100})
