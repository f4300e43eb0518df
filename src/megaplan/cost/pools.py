"""Times of a pipeline whose stages lie on several types of devices: each slot by the rates of its own.

The schedule is replayed with the times of the slots. What data ranks and the optimizer add is that of the device on which they add the
most; how much of an exchange computation hides is that of a mean stage on the first device, whose pace the others keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaplan.cost.blocks import rank_workload
from megaplan.cost.rates import Rates, rates_of
from megaplan.cost.replay import BUBBLE, COPIES, EXPOSED, HOST, PLAIN, ReplayTimer, SlotSpans, linked_orders
from megaplan.cost.times import LayerTime, ModelTimes, model_times
from megaplan.cost.transfers import boundary_ns, layer_transfers
from megaplan.inventory.tensors import Inventory
from megaplan.schedules import SlotTimes, placement, slot_owner
from megaplan.spec.models import Recompute, Spec
from megaplan.spec.pools import joins_pools, parts_of


def pool_rates(spec: Spec) -> list[Rates]:
    """The rates of each type of device, in the order of `parts_of`: measured ones only if all have been measured, so that they compare."""
    found = [rates_of(part.spec) for part in parts_of(spec)]
    return found if all(rates.measured for rates in found) else [rates_of(part.spec, modelled=True) for part in parts_of(spec)]


def slot_times(spec: Spec, inventory: Inventory) -> tuple[ModelTimes, ...]:
    """Times of the whole model on the device of each slot; the boundary is that of the slowest device's links."""
    if not spec.pools:
        return (model_times(spec, inventory),) * spec.mesh.num_slots
    leaves, where, pp = joins_pools(spec), placement(spec.schedule.kind), spec.mesh.pp
    of_rank, links = list[ModelTimes](), list[int]()
    for part, rates in zip(parts_of(spec), pool_rates(spec), strict=True):
        of_rank += [model_times(part.spec, inventory, rates)] * len(part.ranks)
        links.append(boundary_ns(rates, part.spec, rank_workload(part.spec, spec.precision.params), leaves=leaves))
    slowest = {id(each): replace(each, boundary_ns=max(links)) for each in of_rank}
    return tuple(slowest[id(of_rank[slot_owner(where, slot, pp)[0]])] for slot in range(spec.mesh.num_slots))


def of_own_slots(times: Sequence[ModelTimes], spans: Sequence[tuple[int, int]]) -> tuple[LayerTime, ...]:
    """Time of each slot by the times of its own device; one model's times for each slot."""
    of_device = {id(each): each.of_slots(spans) for each in times}
    return tuple(of_device[id(each)][slot] for slot, each in enumerate(times))


def fastest(times: Sequence[ModelTimes]) -> ModelTimes:
    """The least times of every part of the model on any of the slots."""
    if len(set(map(id, times))) == 1:
        return times[0]
    layers = tuple(map(_least, zip(*(each.layers for each in times), strict=True)))
    return ModelTimes(layers, _least([each.first for each in times]), _least([each.last for each in times]), times[0].boundary_ns)


def _least(times: Sequence[LayerTime]) -> LayerTime:
    return LayerTime(min(each.forward_ns for each in times), min(each.input_ns for each in times), min(each.weight_ns for each in times))


def replayed(times: Sequence[LayerTime]) -> SlotTimes:
    """F, I and W of the slots for a replay."""
    forward, inputs, weight = ([getattr(each, part) for each in times] for part in ("forward_ns", "input_ns", "weight_ns"))
    return SlotTimes(tuple(forward), tuple(inputs), tuple(weight))


class PooledTimer:
    """The step of one spec with pools."""

    def __init__(self, inventory: Inventory, spec: Spec) -> None:
        self._inventory, self._spec, self._parts, self._rates = inventory, spec, parts_of(spec), pool_rates(spec)
        where, pp = placement(spec.schedule.kind), spec.mesh.pp
        owners = [slot_owner(where, slot, pp)[0] for slot in range(spec.mesh.num_slots)]
        self._part_of = [next(index for index, part in enumerate(self._parts) if owner in part.ranks) for owner in owners]

    def terms(self, spans: SlotSpans) -> dict[str, int]:
        """Nanoseconds by term, as `ReplayTimer.terms`: of a mean pipeline rank, each slot by its own device."""
        schedule, pp, timers = self._spec.schedule, self._spec.mesh.pp, self._timers()
        count, times = schedule.microbatches_per_update, slot_times(self._spec, self._inventory)
        slots = of_own_slots(times, spans)
        whole = sum(slot.total_ns for slot in slots)
        once = [part.spec.model_copy(update={"recompute": Recompute()}) for part in self._parts]
        kept, fused = (self._total(made, once, spans) for made in (timers, self._timers(fused=True)))
        plain, recompute, exposed = (count * each // pp for each in (kept - fused, whole - kept, self._waits(spans)))
        busy, orders = count * whole // pp, (schedule.kind, pp, self._spec.mesh.vpp, schedule.num_microbatches)
        makespan = schedule.steps_per_update * linked_orders(*orders).makespan(replayed(slots), p2p=times[0].boundary_ns)
        pace = timers[0].sums(self._parts[0].spec)
        added = [timer.beside_terms(part.spec, pace) for timer, part in zip(timers, self._parts, strict=True)]
        found = {
            "layers": busy - plain - recompute - exposed,
            PLAIN: plain,
            "recompute": recompute,
            f"{EXPOSED} transfers": exposed,
            BUBBLE: makespan - busy,
            **max(added, key=lambda terms: sum(terms.values())),
        }
        absent = {PLAIN} if not plain else set()
        if self._rates[0].measured is None:
            absent |= {COPIES, HOST}
        return {name: value for name, value in found.items() if name not in absent}

    def _timers(self, *, fused: bool = False) -> list[ReplayTimer]:
        return [
            ReplayTimer(self._inventory, part.spec, lambda _, own=rates: own, fused=fused)  # type: ignore[misc]
            for part, rates in zip(self._parts, self._rates, strict=True)
        ]

    def _total(self, timers: Sequence[ReplayTimer], specs: Sequence[Spec], spans: SlotSpans) -> int:
        """F, I and W of one microbatch on all slots."""
        times = [timer.times(spec) for timer, spec in zip(timers, specs, strict=True)]
        return sum(slot.total_ns for slot in of_own_slots([times[index] for index in self._part_of], spans))

    def _waits(self, spans: SlotSpans) -> int:
        """Transfers of one microbatch that the layers of all slots wait for."""
        found = 0
        for (start, stop), index in zip(spans, self._part_of, strict=True):
            alone = self._parts[index].spec
            for block in self._inventory.layers[start:stop]:
                load = rank_workload(alone, alone.precision.of(block.family))
                waits = layer_transfers(self._rates[index], alone, load, block)
                found += waits.forward_ns + waits.input_ns
        return found
