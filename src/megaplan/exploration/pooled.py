"""The clock of a pipeline on several types of devices: each slot by the rates of its device, and bounds on the step over all cuts."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megaplan.cost.pools import PooledTimer, devices_of_slots, pool_rates
from megaplan.cost.replay import kept
from megaplan.cost.values import LayerTime, ModelTimes, fastest
from megaplan.exploration.clock import StepOf, Terms
from megaplan.exploration.replayed import ReplayClock, changes_of
from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.partition.bounds import at_slot, mean_path
from megaplan.partition.values import StackCosts, least_busiest, time_costs
from megaplan.spec.models import Spec
from megaplan.spec.pools import alone_specs, parts_of

COARSE = 1 << 12
"""Granularity of the paces for which a mean path is chosen, so that few paths are."""


class PooledClock:
    """`megaplan.cost.pools` on many layouts."""

    basis = ReplayClock.basis.replace("the device's rates", "the rates of each stage's device")
    knows_schedules = True

    def __init__(self, inventory: Inventory) -> None:
        self._timer = PooledTimer(inventory)
        self._busiest: dict[tuple[object, ...], tuple[int, int]] = {}
        self._least: dict[tuple[object, ...], int] = {}
        self._costs: dict[tuple[object, ...], StackCosts] = {}

    def bound_ns(self, spec: Spec) -> int:
        """Per microbatch the busiest rank runs at least its share of the layers by the speed of its device, and at least one layer."""
        key = self._work(spec), spec.mesh.pp
        found = self._busiest.get(key)
        if found is None:
            found = kept(self._busiest)[key] = self._busiest_of(spec)
        rank, chain = found
        return max(rank * spec.schedule.microbatches_per_update, chain) + self._timer.added_ns(spec)

    def _busiest_of(self, spec: Spec) -> tuple[int, int]:
        """Least time of the busiest rank for a microbatch; and of F and I of all layers, one after another."""
        times = self._device_times(spec)
        ranks = Counter[StackCosts]()
        for each, part in zip(times, parts_of(spec), strict=True):
            ranks[time_costs((each,))] += len(part.ranks)
        best = fastest(times)
        rank = max(least_busiest(ranks), *(layer.total_ns for layer in best.layers))
        return rank, sum(each.forward_ns + each.input_ns for each in (*best.layers, best.first, best.last))

    def bound_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """See `bound_ns`."""
        return self.bound_ns(spec_of(layout, policy))

    def tight_bound_ns(self, spec: Spec) -> int:
        """A mean of the paths through the schedule, with every layer on the slot whose device adds the least."""
        mesh, schedule = spec.mesh, spec.schedule
        key = schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches, self._work(spec)
        found = self._least.get(key)
        if found is None:
            found = kept(self._least)[key] = self._on_paths(spec)
        return schedule.steps_per_update * found + self._timer.added_ns(spec)

    def _on_paths(self, spec: Spec) -> int:
        mesh, schedule, own, times = spec.mesh, spec.schedule, devices_of_slots(spec), self._device_times(spec)
        wholes = [sum(layer.total_ns for layer in each.layers) for each in times]
        paces = tuple(COARSE * wholes[index] // max(1, *wholes) for index in own)
        numbers, turns = mean_path(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches, paces, turns=spec.interleaves_pairs)
        found = at_slot(numbers, 0, times[own[0]].first) + at_slot(numbers, -1, times[own[-1]].last)
        least = dict[tuple[LayerTime, ...], int]()
        for layer in zip(*(each.layers for each in times), strict=True):
            if layer not in least:
                least[layer] = min(at_slot(numbers, slot, layer[index]) for slot, index in enumerate(own))
            found += least[layer]
        return -(-found // turns)

    def _device_times(self, spec: Spec) -> list[ModelTimes]:
        return [timer.times(alone) for timer, alone in zip(self._timer.timers(spec), alone_specs(spec), strict=True)]

    def _work(self, spec: Spec) -> tuple[object, ...]:
        return self._timer.timers(spec)[0].work_key(spec)

    def costs(self, spec: Spec) -> StackCosts:
        """F + I + W on the device of each slot, without exchanges that pairs in turns may hide.

        Of a mesh without a pipeline, which no job on several devices has, on the first.
        """
        own = devices_of_slots(spec) if spec.mesh.pp > 1 else (0,)
        key = self._work(spec), own
        found = self._costs.get(key)
        if found is None:
            times = self._device_times(spec)
            found = kept(self._costs)[key] = time_costs([times[index] for index in own])
        return found

    def most_cost(self, spec: Spec, limit_ns: int) -> int:
        """The busiest part runs every microbatch."""
        return (limit_ns - self._timer.added_ns(spec)) // spec.schedule.microbatches_per_update

    def step_ns(self, spec: Spec, spans: Spans) -> int:
        """The step, as `planned_time` computes it."""
        return self._timer.step_ns(spec, spans)

    def variants(self, specs: Sequence[Spec]) -> Iterator[tuple[str, StepOf]]:
        """Changes as of `ReplayClock`, of all devices together."""
        inventory = self._timer.inventory
        letters = {block.family for block in inventory.layers}
        for name, each in changes_of(pool_rates(specs[0])[0], letters):
            yield name, PooledTimer(inventory, each).step_ns

    def terms(self, spec: Spec, spans: Spans) -> Terms:
        """Terms of the step, as `planned_time` computes them."""
        return self._timer.terms(spec, spans)
