"""The step of a plan: its schedule replayed with the times of its own cuts."""

from megaplan.cost.pools import slot_times
from megaplan.cost.values import replayed
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.schedules import Timeline, actions, replay
from megaplan.spec.models import Spec


def planned_step(spec: Spec, inventory: Inventory, spans: Spans) -> Timeline:
    """One optimizer step's forwards and backwards in nanoseconds, from the device's peak rates.

    Args:
        spec: A validated spec.
        inventory: Parameter tensors of the spec.
        spans: Cuts: one half-open span of layers per slot.
    """
    mesh, schedule, times = spec.mesh, spec.schedule, slot_times(spec, inventory)
    orders = actions(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
    return replay(
        orders, replayed(times, spans, spec.num_copies), p2p=times[0].widest_ns([stop for _, stop in spans[:-1]]), copies=spec.num_copies
    )
