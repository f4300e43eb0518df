"""Bytes that one microbatch keeps on each slot, and a rank's memory over a replayed step."""

from megaplan.budget.values import Budget, KeptBytes
from megaplan.columns import Phase
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout
from megaplan.schedules import ActionKind, Timeline, in_flight, peak_bytes
from megaplan.spec.models import Spec

Level = tuple[int, int]
"""(time, bytes): valid from that time to the next level's."""


def kept_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[KeptBytes, ...]:
    """Bytes of one microbatch on each slot, in model order: the factors of the counts in `megaplan.schedules.in_flight`.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
    """
    kept: tuple[KeptBytes, ...] = spec.host.kind.kept(spec, inventory, layout)
    return kept


def memory_over_time(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget, step: Timeline) -> tuple[tuple[Level, ...], ...]:
    """Bytes that each pp rank holds during a replayed step, as steps of a curve.

    Microbatches begin and end as in the replay. Everything else of the rank (states, gradients, gathered parameters, the working set of
    the block that runs) is drawn as constant, so the curve's maximum is the phase's peak in the budget.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
        budget: Budget of this spec and layout.
        step: The schedule's replay.
    """
    kept = kept_bytes(spec, inventory, layout)
    mesh, schedule = spec.mesh, spec.schedule
    vectors = in_flight(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
    per_stage = mesh.world_size // mesh.pp
    peaks = dict.fromkeys(range(mesh.pp), 0)
    for found in budget.ranks:  # each rank is in exactly one of them
        for stage in {rank // per_stage for rank in found.ranks}:
            peaks[stage] = max(peaks[stage], found.phases[Phase.FORWARD_BACKWARD])
    curves = []
    for pp_rank, timed in enumerate(step.ranks):
        full, pending = zip(*(kept[slot.index] for slot in layout.of_rank(pp_rank)), strict=True)
        held = peaks[pp_rank] - peak_bytes(vectors[pp_rank], full, pending)
        levels: list[Level] = [(0, held)]
        changes: list[tuple[int, int]] = []
        for item in timed:
            for part in item.action.parts:
                match part.kind:
                    case ActionKind.FORWARD:
                        changes.append((item.start, kept[part.slot].full))
                    case ActionKind.BACKWARD:
                        changes.append((item.stop, -kept[part.slot].full))
                    case ActionKind.INPUT:
                        changes.append((item.stop, kept[part.slot].pending - kept[part.slot].full))
                    case ActionKind.WEIGHT:
                        changes.append((item.stop, -kept[part.slot].pending))
        for time, change in sorted(changes):  # memory that ends at a time is freed before the next begins
            held += change
            levels.append((time, held))
        curves.append(tuple(levels))
    return tuple(curves)
