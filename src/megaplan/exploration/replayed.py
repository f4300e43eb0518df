"""The clock of hosts without constants: the schedule's replay, layer times from the device's rates, and data parallelism."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeVar

from megaplan.cost.blocks import rank_workload
from megaplan.cost.data import DataTimes, data_times, exposed_ns, local_elements
from megaplan.cost.rates import rates_of
from megaplan.cost.times import LayerTime, ModelTimes, end_times, layer_time
from megaplan.cost.transfers import layer_transfers
from megaplan.exploration.clock import BUBBLE, EXPOSED, Terms
from megaplan.exploration.paths import at_slot, least, mean_path
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Inventory
from megaplan.layout.spans import Spans
from megaplan.partition.values import StackCosts
from megaplan.schedules import LinkedOrders, SlotTimes, actions, link
from megaplan.spec.models import Spec

K = TypeVar("K")
V = TypeVar("V")
MOST_KEPT = 20_000
"""Values of a kind that a clock keeps; beyond it all are dropped."""
NO_TIME = LayerTime()


class Sums(NamedTuple):
    """Of one microbatch on all pipeline ranks.

    Attributes:
        total: F, I and W.
        forward: F.
        chain: F and I, which the first microbatch runs one after another.
        largest: The largest layer, and either end with the layer it stands with.
        first: Of the first slot, beside layers.
        last: Of the last slot, beside layers.
    """

    total: int
    forward: int
    chain: int
    largest: int
    first: LayerTime
    last: LayerTime


class ReplayClock:
    """Replayed schedules with modelled layer times."""

    basis = "replay of the schedule with layer times from the device's rates; data parallelism modelled"

    def __init__(self, inventory: Inventory, spec: Spec) -> None:
        """`spec`: any of those that are timed; they differ in what a search varies."""
        self._inventory, self._rates = inventory, rates_of(spec)
        makes: dict[int, tuple[Block, int]] = {}
        for block in inventory.layers[:-1]:
            makes[id(block)] = block, makes.get(id(block), (block, 0))[1] + 1
        self._makes = list(makes.values())
        self._layers: dict[tuple[object, ...], LayerTime] = {}
        self._ends: dict[tuple[object, ...], tuple[LayerTime, LayerTime, int]] = {}
        self._sums: dict[tuple[object, ...], Sums] = {}
        self._data: dict[tuple[int, ...], DataTimes] = {}
        self._elements: dict[tuple[int, int, int], tuple[int, int]] = {}

    def times(self, spec: Spec) -> ModelTimes:
        """Of each layer and both ends; as `model_times` says them."""
        layers, makes = self._inventory.layers, dict[tuple[int, str], LayerTime]()
        found = []
        for index, block in enumerate(layers):
            make = id(block), spec.policy(index, block.family)
            time = makes.get(make)
            if time is None:
                time = makes[make] = self._layer(spec, block, make[1])
            found.append(time)
        return ModelTimes(tuple(found), *self._end(spec))

    def bound_ns(self, spec: Spec) -> int:
        """A rank has at least its share of the layers, or the largest of them, every microbatch."""
        sums = self._sums_of(spec)
        return self._bound(spec, sums, max(-(-sums.total // spec.mesh.pp), sums.largest))

    def tight_bound_ns(self, spec: Spec) -> int:
        """From a mean of the paths through the schedule."""
        sums, mesh, count = self._sums_of(spec), spec.mesh, spec.schedule.microbatches_per_update
        if mesh.pp == 1:
            return count * sums.total + self._beside(spec, sums)
        numbers, turns = mean_path(spec.schedule.kind, mesh.pp, mesh.vpp, count)
        last = self._inventory.layers[-1]
        found = at_slot(numbers, 0, sums.first) + at_slot(numbers, -1, sums.last) + least(numbers, self._layer(spec, last, "none"))
        for block, often in self._makes:
            found += often * least(numbers, self._layer(spec, block, spec.recompute.of(block.family)))
        return -(-found // turns) + self._beside(spec, sums)

    def _bound(self, spec: Spec, sums: Sums, load: int) -> int:
        mesh, count = spec.mesh, spec.schedule.microbatches_per_update
        step = max(count * load, sums.chain)
        if mesh.pp > 1 and spec.schedule.kind in ("1f1b", "gpipe"):
            step = max(step, filled(sums.total, mesh.pp, count))
        return step + self._beside(spec, sums)

    def costs(self, spec: Spec) -> StackCosts:
        """F + I + W."""
        times = self.times(spec)
        layers = tuple([layer.total_ns for layer in times.layers])
        return StackCosts(layers, times.first.total_ns, times.last.total_ns, unit="ns")

    def step_ns(self, spec: Spec, spans: Spans) -> int:
        """The replay's makespan, and what data ranks add."""
        sums = self._sums_of(spec)
        return self._makespan(spec, sums, spans) + self._beside(spec, sums)

    def terms(self, spec: Spec, spans: Spans) -> Terms:
        """Of a mean rank: its layers, what runs again, what waits; then idle time, data ranks and the optimizer."""
        count, pp, sums = spec.schedule.microbatches_per_update, spec.mesh.pp, self._sums_of(spec)
        plain = self._sums_of(spec.model_copy(update={"recompute": type(spec.recompute)()}))
        waits, data = self._waits(spec), self._data_of(spec)
        return {
            "layers": count * (plain.total - waits) // pp,
            "recompute": count * (sums.total - plain.total) // pp,
            f"{EXPOSED} transfers": count * waits // pp,
            BUBBLE: self._makespan(spec, sums, spans) - count * sums.total // pp,
            f"{EXPOSED} data": self._beside(spec, sums) - data.optimizer_ns,
            "optimizer": data.optimizer_ns,
        }

    def _waits(self, spec: Spec) -> int:
        """Of one microbatch, transfers that layers wait for."""
        found = 0
        for block in self._inventory.layers:
            waits = layer_transfers(self._rates, spec, rank_workload(spec, spec.precision.of(block.family)), block)
            found += waits.forward_ns + waits.input_ns
        return found

    def _beside(self, spec: Spec, sums: Sums) -> int:
        data = self._data_of(spec)
        return exposed_ns(spec, data, sums.forward, sums.total) + data.optimizer_ns

    def _data_of(self, spec: Spec) -> DataTimes:
        mesh = spec.mesh
        degrees = mesh.tp, mesh.ep, mesh.etp
        key = (*degrees, mesh.pp, mesh.cp, mesh.dp_replicate, mesh.dp_shard, spec.precision.reduce.bytes)
        found = self._data.get(key)
        if found is None:
            if degrees not in self._elements:
                self._elements[degrees] = local_elements(self._inventory, *degrees)
            found = _kept(self._data)[key] = data_times(spec, self._rates, *self._elements[degrees])
        return found

    def _makespan(self, spec: Spec, sums: Sums, spans: Spans) -> int:
        count, mesh = spec.schedule.microbatches_per_update, spec.mesh
        if len(spans) == 1:
            return count * sums.total
        times = self.times(spec)
        slots = times.of_slots(spans)
        lengths = SlotTimes(
            tuple([slot.forward_ns for slot in slots]), tuple([slot.input_ns for slot in slots]), tuple([slot.weight_ns for slot in slots])
        )
        return _linked(spec.schedule.kind, mesh.pp, mesh.vpp, count).makespan(lengths, p2p=times.boundary_ns)

    def _sums_of(self, spec: Spec) -> Sums:
        mesh = spec.mesh
        policies = tuple([spec.recompute.of(block.family) for block, _ in self._makes])
        degrees = mesh.tp, mesh.cp, mesh.ep, mesh.etp, mesh.vocab_parallel
        key = (policies, degrees, spec.batch.micro_batch_size, spec.host.kernels)
        found = self._sums.get(key)
        if found is None:
            first, last, _ = self._end(spec)
            layers = self._inventory.layers
            end = self._layer(spec, layers[-1], "none")
            start = self._layer(spec, layers[0], spec.policy(0, layers[0].family))
            each = [(self._layer(spec, block, policy), count) for (block, count), policy in zip(self._makes, policies, strict=True)]
            total = first.total_ns + last.total_ns + end.total_ns + sum([time.total_ns * count for time, count in each])
            forward = first.forward_ns + last.forward_ns + end.forward_ns + sum([time.forward_ns * count for time, count in each])
            weight = first.weight_ns + last.weight_ns + end.weight_ns + sum([time.weight_ns * count for time, count in each])
            largest = max([first.total_ns + start.total_ns, last.total_ns + end.total_ns, *[time.total_ns for time, _ in each]])
            found = _kept(self._sums)[key] = Sums(total, forward, total - weight, largest, first, last)
        return found

    def _layer(self, spec: Spec, block: Block, policy: str) -> LayerTime:
        mesh = spec.mesh
        experts = (mesh.ep, mesh.etp) if FAMILIES[block.family].banks else ()
        key = (id(block), policy, mesh.tp, mesh.cp, spec.batch.micro_batch_size, spec.host.kernels, experts)
        found = self._layers.get(key)
        if found is None:
            found = _kept(self._layers)[key] = layer_time(spec, self._rates, block, policy)
        return found

    def _end(self, spec: Spec) -> tuple[LayerTime, LayerTime, int]:
        mesh = spec.mesh
        key = (mesh.tp, mesh.cp, mesh.vocab_parallel, mesh.pp > 1, spec.batch.micro_batch_size, spec.host.kernels)
        found = self._ends.get(key)
        if found is None:
            found = _kept(self._ends)[key] = end_times(spec, self._rates)
        return found


def _kept(known: dict[K, V]) -> dict[K, V]:
    """The dict, emptied if it is full."""
    if len(known) >= MOST_KEPT:
        known.clear()
    return known


def filled(total: int, pp: int, count: int) -> int:
    """A bound of 1F1B's and GPipe's step: T ≥ W / (1 − (1 − 1/m)^p), W the time of one microbatch on all p ranks.

    A rank's m microbatches wait for the forwards of those before it, and the backwards of those follow: m · t_r + Σ_{s < r} t_s ≤ T. The
    largest Σ t_r that this allows is T (1 − (1 − 1/m)^p).
    """
    whole, left = count**pp, (count - 1) ** pp
    return int(-(-total * whole // (whole - left)))


@lru_cache(maxsize=128)
def _linked(kind: str, pp: int, vpp: int, count: int) -> LinkedOrders:
    return link(actions(kind, pp, vpp, count), pp * vpp)
