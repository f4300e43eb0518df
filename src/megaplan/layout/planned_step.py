"""The step of a plan: its schedule replayed with the times of its own cuts."""

from __future__ import annotations

from megaplan.cost.times import model_times
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.schedules import SlotTimes, Timeline, actions, replay
from megaplan.spec.models import Spec


def planned_step(spec: Spec, inventory: Inventory, spans: Spans) -> Timeline:
    """One optimizer step's forwards and backwards in nanoseconds, from the device's peak rates.

    Args:
        spec: A validated spec.
        inventory: Parameter tensors of the spec.
        spans: Cuts: one half-open span of layers per slot.
    """
    mesh, schedule, times = spec.mesh, spec.schedule, model_times(spec, inventory)
    slots = times.of_slots(spans)
    slot_times = SlotTimes(
        tuple(slot.forward_ns for slot in slots), tuple(slot.input_ns for slot in slots), tuple(slot.weight_ns for slot in slots)
    )
    return replay(actions(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches), slot_times, p2p=times.boundary_ns)
