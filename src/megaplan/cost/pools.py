"""Times of a pipeline whose stages are on several types of devices: each slot by the rates of its device.

The schedule is replayed with the times of the slots. The time of data ranks and the optimizer is taken from the device on which it is
longest; the hidden share of exchanges from a mean stage on the first device, which sets the pace.
"""

from collections.abc import Sequence
from dataclasses import replace

from megaplan.cost.blocks import rank_workload
from megaplan.cost.rates import Rates, rates_of
from megaplan.cost.replay import (
    WITHOUT_RECOMPUTE,
    Change,
    ReplayTimer,
    SlotSpans,
    Sums,
    linked_orders,
    terms_of,
    without_unmeasured,
)
from megaplan.cost.times import model_times
from megaplan.cost.transfers import boundary_times, layer_transfers
from megaplan.cost.values import LayerTime, ModelTimes, of_own_slots, replayed
from megaplan.inventory.tensors import Block, Inventory
from megaplan.schedules import placement, slot_owner
from megaplan.spec.models import Spec
from megaplan.spec.pools import alone_specs, joins_pools, parts_of


def pool_rates(spec: Spec) -> list[Rates]:
    """The rates of each type of device, in the order of `parts_of`: measured rates only if all types have them."""
    alone = alone_specs(spec)
    found = [rates_of(each) for each in alone]
    return found if all(rates.measured for rates in found) else [rates_of(each, modelled=True) for each in alone]


def slot_times(spec: Spec, inventory: Inventory) -> tuple[ModelTimes, ...]:
    """Times of the whole model on the device of each slot; the boundary's time is by the slowest device's links."""
    if not spec.pools:
        return (model_times(spec, inventory),) * spec.mesh.num_slots
    return PooledTimer(inventory).slots(spec)


def devices_of_slots(spec: Spec) -> tuple[int, ...]:
    """Index of each slot's type of device, in the order of `parts_of`."""
    where, pp, parts = placement(spec.schedule.kind), spec.mesh.pp, parts_of(spec)
    of_rank = [index for index, part in enumerate(parts) for _ in part.ranks]
    return tuple(of_rank[slot_owner(where, slot, pp)[0]] for slot in range(spec.mesh.num_slots))


class PooledTimer:
    """Steps of one model on the same pools, with any mesh, schedule, batch and recompute policy; see also `ReplayTimer`."""

    def __init__(self, inventory: Inventory, change: Change | None = None) -> None:
        """`change` is applied to the rates of each device; None leaves them unchanged."""
        self.inventory, self._change = inventory, change
        self._timers: dict[tuple[str, bool], list[ReplayTimer]] = {}

    def timers(self, spec: Spec, *, fused: bool = False) -> list[ReplayTimer]:
        """A timer of each type of device, in the order of `parts_of`; `fused` as for `ReplayTimer`."""
        key = spec.host.kernels, fused
        if key not in self._timers:
            rates = [self._change(own) if self._change is not None else own for own in pool_rates(spec)]
            self._timers[key] = [
                ReplayTimer(self.inventory, alone, lambda _, own=own: own, fused=fused)  # type: ignore[misc]
                for alone, own in zip(alone_specs(spec), rates, strict=True)
            ]
        return self._timers[key]

    def slots(self, spec: Spec) -> tuple[ModelTimes, ...]:
        """See `slot_times`."""
        leaves = joins_pools(spec)
        timed = [(timer, part.spec) for timer, part in zip(self.timers(spec), parts_of(spec), strict=True)]
        hops = [boundary_times(timer.rates(alone), alone, leaves=leaves) for timer, alone in timed]
        times = [replace(timer.times(alone), boundaries_ns=max(hops)) for timer, alone in timed]
        return tuple(times[index] for index in devices_of_slots(spec))

    def sums(self, spec: Spec) -> list[Sums]:
        """The sums of one microbatch over all pipeline ranks, for each type of device as if all ranks had it."""
        return [timer.sums(alone) for timer, alone in zip(self.timers(spec), alone_specs(spec), strict=True)]

    def layer(self, spec: Spec, block: Block, policy: str, *, scaled: bool) -> list[LayerTime]:
        """One layer on each type of device."""
        timed = zip(self.timers(spec), alone_specs(spec), strict=True)
        return [timer.layer(alone, block, policy, scaled=scaled) for timer, alone in timed]

    def step_ns(self, spec: Spec, spans: SlotSpans) -> int:
        """The sum of `terms`."""
        return self._replayed(spec, self.slots(spec), spans)[0] + self.added_ns(spec)

    def added_ns(self, spec: Spec) -> int:
        """Time of a step outside its microbatches, which does not depend on cuts."""
        return sum(self._added_terms(spec).values())

    def _added_terms(self, spec: Spec) -> dict[str, int]:
        timed = list(zip(self.timers(spec), alone_specs(spec), strict=True))
        pace = timed[0][0].sums(timed[0][1])
        return max((timer.outside_terms(alone, pace) for timer, alone in timed), key=lambda terms: sum(terms.values()))

    def _replayed(self, spec: Spec, times: Sequence[ModelTimes], spans: SlotSpans) -> tuple[int, int]:
        """Time of all microbatches of an update, and the time that turns hide on all ranks."""
        orders = spec.schedule.kind, spec.mesh.pp, spec.mesh.vpp, spec.schedule.num_microbatches
        linked, lengths, steps = linked_orders(*orders), replayed(times, spans), spec.schedule.steps_per_update
        return steps * linked.makespan(lengths, p2p=times[0].widest_ns([stop for _, stop in spans[:-1]])), steps * linked.hidden(lengths)

    def turns_ns(self, spec: Spec, spans: SlotSpans) -> tuple[int, int]:
        """Time of the row exchanges of a step at which pairs take turns, and its hidden part, on an average pipeline rank."""
        times, count, pp = self.slots(spec), spec.schedule.microbatches_per_update, spec.mesh.pp
        exchanged = sum(slot.total_ns - slot.compute_ns for slot in of_own_slots(times, spans))
        return count * exchanged // pp, self._replayed(spec, times, spans)[1] // pp

    def terms(self, spec: Spec, spans: SlotSpans) -> dict[str, int]:
        """Nanoseconds by term, as `ReplayTimer.terms`: of a mean pipeline rank, each slot by its own device."""
        pp, count, times = spec.mesh.pp, spec.schedule.microbatches_per_update, self.slots(spec)
        own, timers, specs = devices_of_slots(spec), self.timers(spec), alone_specs(spec)
        whole, running = sum(slot.total_ns for slot in of_own_slots(times, spans)), _running(timers, specs, own, spans)
        once = [alone.model_copy(update=WITHOUT_RECOMPUTE) for alone in specs]
        kept, fused = (_running(each, once, own, spans) for each in (timers, self.timers(spec, fused=True)))
        waits = self._waits(spec, own, spans) + whole - running
        plain, recompute, exposed = (count * each // pp for each in (kept - fused, running - kept, waits))
        makespan, hidden = self._replayed(spec, times, spans)
        busy, exposed = count * whole // pp - hidden // pp, exposed - hidden // pp
        found = terms_of(makespan, busy, plain, recompute, exposed) | self._added_terms(spec)
        return without_unmeasured(found, self.timers(spec)[0].rates(spec))

    def _waits(self, spec: Spec, own: Sequence[int], spans: SlotSpans) -> int:
        """Transfers of one microbatch that the layers of all slots wait for."""
        found, parts = 0, [(timer.rates(spec), alone) for timer, alone in zip(self.timers(spec), alone_specs(spec), strict=True)]
        for (start, stop), index in zip(spans, own, strict=True):
            rates, alone = parts[index]
            for block in self.inventory.layers[start:stop]:
                waits = layer_transfers(rates, alone, rank_workload(alone, alone.precision.of(block.family)), block)
                found += waits.forward_ns + waits.input_ns
        return found


def _running(timers: Sequence[ReplayTimer], specs: Sequence[Spec], own: Sequence[int], spans: SlotSpans) -> int:
    """F, I and W of one microbatch on all slots, without waits for copies of kept tensors."""
    times = [timer.running(alone) for timer, alone in zip(timers, specs, strict=True)]
    return sum(slot.total_ns for slot in of_own_slots([times[index] for index in own], spans))


def timer_of(spec: Spec, inventory: Inventory) -> ReplayTimer | PooledTimer:
    """The timer of a spec's steps: if there are several types of devices, each slot has its own rates."""
    return PooledTimer(inventory) if spec.pools else ReplayTimer(inventory, spec)
