"""What one microbatch keeps on each slot: the bytes that a schedule's in-flight counts multiply."""

from __future__ import annotations

from megaplan.budget.build import saved_bytes_by_slot
from megaplan.budget.values import Budget
from megaplan.columns import Phase
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout
from megaplan.schedule import Kind, Timeline, in_flight, peak_bytes
from megaplan.spec.models import Spec

Level = tuple[int, int]
"""(time, bytes): from that time on, until the next one's."""


def memory_over_time(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget, step: Timeline) -> tuple[tuple[Level, ...], ...]:
    """Bytes that each pp rank holds during a replayed step, as steps of a curve.

    A microbatch holds what its slot saves from the start of F to the end of B, or of W where the backward is split. Everything else of the
    rank (states, gradients, gathered parameters, the working set of the block that runs) is drawn as constant, so that the curve's
    highest point is the phase's peak in the budget.

    Args:
        spec: A checked spec.
        inventory: Its parameter tensors.
        layout: Its slots.
        budget: Of the three.
        step: The schedule's replay.
    """
    saved = saved_bytes_by_slot(spec, inventory, layout)
    mesh, schedule = spec.mesh, spec.schedule
    vectors = in_flight(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
    per_stage = mesh.world_size // mesh.pp
    curves = []
    for pp_rank, timed in enumerate(step.ranks):
        chunks = [saved[slot.index] for slot in layout.of_rank(pp_rank)]
        peak = max(budget.of_rank(pp_rank * per_stage + offset).phases[Phase.FORWARD_BACKWARD] for offset in range(per_stage))
        held = peak - peak_bytes(vectors[pp_rank], chunks, chunks)
        levels: list[Level] = [(0, held)]
        changes: list[tuple[int, int]] = []
        for item in timed:
            for part in item.action.parts:
                if part.kind is Kind.FORWARD:
                    changes.append((item.start, saved[part.slot]))
                elif part.kind is not Kind.INPUT:
                    changes.append((item.stop, -saved[part.slot]))
        for time, change in sorted(changes, key=lambda found: (found[0], found[1])):  # what ends at a moment is gone when the next begins
            held += change
            levels.append((time, held))
        curves.append(tuple(levels))
    return tuple(curves)
