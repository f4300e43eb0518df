"""A schedule as text: one row a slot, one character a unit of time."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.cli.table import WIDTH
from megaplan.schedule import Kind, SlotTimes, actions, computations, placement, replay, slot_owner
from megaplan.spec.models import Spec

MAX_SLOTS = 64
"""More slots than this are not drawn."""

_LETTERS = {Kind.FORWARD: "0123456789", Kind.BACKWARD: "abcdefghij", Kind.INPUT: "abcdefghij", Kind.WEIGHT: "ABCDEFGHIJ"}
LEGEND = "0-9 forward, a-j backward of a microbatch, its number mod 10; · waits"
SPLIT_LEGEND = "A-J the weight half of a backward whose input half is a-j"


def timeline_lines(spec: Spec) -> Iterator[str]:
    """The start of one step, and what each pp rank waits, were all stages equal and a backward as long as two forwards.

    Later columns are cut off where the line ends.
    """
    mesh, schedule = spec.mesh, spec.schedule
    num_slots = mesh.pp * mesh.vpp
    if num_slots > MAX_SLOTS:
        yield f"{num_slots} slots are too many to draw"
        return
    orders = actions(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches)
    where = placement(schedule.kind)
    step = replay(orders, SlotTimes.equal(num_slots))
    labels = {slot: "pp {} chunk {}".format(*slot_owner(where, slot, mesh.pp)) for slot in range(num_slots)}
    margin = max(map(len, labels.values())) + 2
    length = min(step.makespan, WIDTH - margin - 1)
    cut = "…" if length < step.makespan else ""
    rows = {slot: ["·"] * length for slot in labels}
    for rank in step.ranks:
        for timed in rank:
            for part in timed.action.parts:  # both parts of an overlap take its whole time
                for time in range(timed.start, min(timed.stop, length)):
                    rows[part.slot][time] = _LETTERS[part.kind][part.microbatch % 10]
    for slot in sorted(labels, key=lambda slot: slot_owner(where, slot, mesh.pp)):
        yield labels[slot].ljust(margin) + "".join(rows[slot]) + cut
    waits = sorted(set(step.bubbles))
    span = str(waits[0]) if len(waits) == 1 else f"{waits[0]} to {waits[-1]}"
    yield f"{step.makespan} units a step; each pp rank waits {span} of them ({100 * waits[-1] / step.makespan:.1f}%)"
    yield LEGEND
    if any(part.kind is Kind.WEIGHT for order in orders for part in computations(order)):
        yield SPLIT_LEGEND
