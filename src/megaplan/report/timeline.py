"""A replayed step as compact data: the actions and memory of every pipeline rank over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaplan.budget.slots import Level, memory_over_time
from megaplan.budget.values import Budget
from megaplan.layout.planned_step import planned_step
from megaplan.schedules import Timeline, num_actions

if TYPE_CHECKING:
    from megaplan.api.load import LoadedJob

MAX_ACTIONS = 24_000
"""Largest number of actions on a page: about 20 bytes each with the memory that they change."""


def step_document(job: LoadedJob, budget: Budget) -> dict[str, Any]:
    """One optimizer step, in ns and bytes, from the device's peak rates; or the reason (text) that the page has no timeline.

    Returns:
        `shapes`: [[[kind, slot], …], ns] of every distinct action; `ranks`: busy and idle time, and `actions`, flat: shape, idle time
        before it, and the microbatch of each part; `memory`: `steps`, the distinct changes of bytes, and for each rank the bytes at its
        start and, flat, the time since the last change and the index of the change.
    """
    mesh, schedule = job.spec.mesh, job.spec.schedule
    if (most := num_actions(mesh.pp, mesh.vpp, schedule.num_microbatches)) > MAX_ACTIONS:
        what = f"{mesh.pp * mesh.vpp} slots with {schedule.num_microbatches:,} microbatches have up to {most:,}"
        fewer = MAX_ACTIONS // (3 * mesh.pp * mesh.vpp) // mesh.pp * mesh.pp
        hint = f" `--set schedule.num_microbatches={fewer}` shows fewer microbatches." if fewer >= 2 * mesh.pp else ""
        return {"reason": f"A page shows at most {MAX_ACTIONS:,} actions, and {what}.{hint}"}
    step = planned_step(job.spec, job.inventory, job.spans)
    levels = memory_over_time(job.spec, job.inventory, job.layout, budget, step)
    return {"makespan": step.makespan, **_actions(step), "memory": _memory(levels)}


def _actions(step: Timeline) -> dict[str, Any]:
    shapes: dict[tuple[tuple[tuple[str, int], ...], int], int] = {}
    ranks = []
    for rank, timed in enumerate(step.ranks):
        flat: list[int] = []
        free = 0
        for item in timed:
            parts = item.action.parts
            shape = (tuple((str(part.kind), part.slot) for part in parts), item.stop - item.start)
            flat += [shapes.setdefault(shape, len(shapes)), item.start - free, *(part.microbatch for part in parts)]
            free = item.stop
        ranks.append({"busy": step.busy[rank], "idle": step.bubbles[rank], "idle_inside": step.bubbles_inside[rank], "actions": flat})
    return {"shapes": [[list(map(list, parts)), length] for parts, length in shapes], "ranks": ranks}


def _memory(levels: tuple[tuple[Level, ...], ...]) -> dict[str, Any]:
    steps: dict[int, int] = {}
    ranks = []
    for curve in levels:
        settled = dict(curve)  # if several changes have the same time, the last level is drawn
        start = curve[0][1]
        flat: list[int] = []
        before, held = 0, start
        for time, size in settled.items():
            if size != held:
                flat += [time - before, steps.setdefault(size - held, len(steps))]
                before, held = time, size
        ranks.append({"start": start, "changes": flat})
    return {"steps": list(steps), "ranks": ranks}
