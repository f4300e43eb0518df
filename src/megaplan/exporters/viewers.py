"""Exports for viewers: the replayed step of a plan, which `chrome_trace` and `memory_snapshot` write."""

from typing import NamedTuple

from megaplan.budget.peaks import build_budget
from megaplan.budget.slots import Level, kept_bytes, memory_over_time
from megaplan.budget.values import KeptBytes, RankBudget
from megaplan.columns import Phase
from megaplan.diagnostics import refuse
from megaplan.exporters.values import Source
from megaplan.layout.planned_step import planned_step
from megaplan.layout.ranks import rank_coordinate
from megaplan.schedules import MAX_REPLAYED, Timeline, num_actions


class ReplayedStep(NamedTuple):
    """A replayed step with its memory.

    Attributes:
        timeline: Actions of every pp rank, in ns, with the times of the device's peak rates.
        chunks: Chunk of each slot.
        kept: Bytes of one microbatch on each slot.
        levels: (ns, bytes) of every pp rank.
        ranks: Budget with the largest forward and backward of each pp rank, which the levels follow.
    """

    timeline: Timeline
    chunks: tuple[int, ...]
    kept: tuple[KeptBytes, ...]
    levels: tuple[tuple[Level, ...], ...]
    ranks: tuple[RankBudget, ...]


def replayed_step(source: Source) -> ReplayedStep:
    """Replay the schedule of a plan.

    Raises:
        MegaplanError: MP481, it has too many actions.
    """
    spec, inventory, layout = source.spec, source.inventory, source.layout
    mesh, schedule = spec.mesh, spec.schedule
    if (most := num_actions(mesh.pp, mesh.vpp, schedule.num_microbatches)) > MAX_REPLAYED:
        detail = f"{mesh.pp * mesh.vpp} slots with {schedule.num_microbatches:,} microbatches have up to {most:,} actions"
        hint = "--set schedule.num_microbatches=N with fewer microbatches"
        raise refuse("MP481", f"{detail}, and at most {MAX_REPLAYED:,} are replayed", hint, key="schedule.num_microbatches")
    budget = build_budget(spec, inventory, layout)
    timeline = planned_step(spec, inventory, layout.spans)
    # equal stages share a budget
    stages = {id(held): {rank_coordinate(mesh, rank)["pp"] for rank in held.ranks} for held in budget.ranks}
    ranks = tuple(
        max((held for held in budget.ranks if pp in stages[id(held)]), key=lambda held: held.phases[Phase.FORWARD_BACKWARD])
        for pp in range(mesh.pp)
    )
    return ReplayedStep(
        timeline,
        tuple(slot.chunk for slot in layout.slots),
        kept_bytes(spec, inventory, layout),
        memory_over_time(spec, inventory, layout, budget, timeline),
        ranks,
    )
