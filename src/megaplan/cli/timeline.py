"""A schedule as text: one row per slot, one character per unit of time."""

from collections.abc import Callable, Iterator

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import Spans
from megaplan.layout.planned_step import planned_step
from megaplan.schedules import (
    MAX_REPLAYED,
    ActionKind,
    SlotTimes,
    Timeline,
    actions,
    num_actions,
    num_copies,
    placement,
    replay,
    slot_owner,
)
from megaplan.schedules.placement import Placement
from megaplan.spec.models import Spec
from megaplan.terminal.table import line_width, wrap
from megaplan.units import format_ns

MAX_SLOTS = 64
"""Largest number of slots that are drawn."""

_LETTERS = {
    ActionKind.FORWARD: "0123456789",
    ActionKind.BACKWARD: "abcdefghij",
    ActionKind.INPUT: "abcdefghij",
    ActionKind.WEIGHT: "ABCDEFGHIJ",
}
LEGEND = "0-9 forward, a-j backward of a microbatch, its number mod 10; · idle"
SPLIT_LEGEND = "A-J weight gradients of the backward a-j"
OVERLAP_LEGEND = "an overlapping forward and backward occupy both their rows at once"


def timeline_lines(spec: Spec, spans: Spans) -> Iterator[str]:
    """The start of one step drawn with equal slots, the idle time of pp ranks in it, and the idle time with the plan's own slots."""
    mesh, schedule = spec.mesh, spec.schedule
    where = placement(schedule.kind)
    num_slots = mesh.num_slots * num_copies(where)
    if (total := num_actions(mesh.pp, mesh.vpp, schedule.num_microbatches)) > MAX_REPLAYED:
        yield f"up to {total:,} actions per step are too many to replay"
        return
    if num_slots > MAX_SLOTS:
        yield f"{num_slots} slots are too many to draw"
    else:
        orders = actions(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
        step = replay(orders, SlotTimes.equal(num_slots), copies=num_copies(where))
        yield from drawing(step, where, mesh.pp, num_slots)
        yield from legend(step)
        yield f"drawn with equal slots, F = I = W = 1: {step.makespan} units per step; {_idle(step, str)}"
    step = planned_step(spec, build_inventory(spec), spans)
    yield from wrap(f"this plan: microbatches of a step {format_ns(step.makespan)}; {_idle(step, format_ns)}", indent="  ")


def _idle(step: Timeline, shown: Callable[[int], str]) -> str:
    """The idle time of the ranks until all have finished, with its share of the step."""
    least, most = min(step.bubbles), max(step.bubbles)
    low, high = (f"{100 * wait / max(1, step.makespan):.1f}%" for wait in (least, most))
    return f"pp ranks idle {shown(most)} ({high})" if low == high else f"pp ranks idle {shown(least)} ({low}) to {shown(most)} ({high})"


def drawing(step: Timeline, where: Placement, pp: int, num_slots: int, width: int | None = None) -> Iterator[str]:
    """One line per slot, grouped by rank; lines are truncated at `width`.

    Args:
        step: A replayed step.
        where: Placement of slots on ranks.
        pp: Pipeline degree.
        num_slots: Number of slots of the pipeline.
        width: Line width in characters; `line_width` if None.
    """
    labels = {slot: "pp {} chunk {}".format(*slot_owner(where, slot, pp)) for slot in range(num_slots)}
    margin = max(map(len, labels.values())) + 2
    length = min(step.makespan, (line_width() if width is None else width) - margin - 1)
    cut = "…" if length < step.makespan else ""
    rows = {slot: ["·"] * length for slot in labels}
    for rank in step.ranks:
        for timed in rank:
            for part in timed.action.parts:
                for time in range(timed.start, min(timed.stop, length)):
                    rows[part.slot][time] = _LETTERS[part.kind][part.microbatch % 10]
    for slot in sorted(labels, key=lambda slot: slot_owner(where, slot, pp)):
        yield labels[slot].ljust(margin) + "".join(rows[slot]) + cut


def legend(step: Timeline) -> Iterator[str]:
    """The meaning of the characters that occur in a drawing."""
    yield LEGEND
    steps = [timed.action for rank in step.ranks for timed in rank]
    if any(part.kind is ActionKind.WEIGHT for action in steps for part in action.parts):
        yield SPLIT_LEGEND
    if any(len(action.parts) > 1 for action in steps):
        yield OVERLAP_LEGEND
