"""`megaplan schedule`: a pipeline schedule without a model: orders, in-flight counts, bubbles, and a drawing."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.options import AsJson
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.terminal import output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaplan.schedule import InFlight, Orders, Timeline

FORMAT = "megaplan.schedule/1"


class ScheduleName(StrEnum):
    """The schedules."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved_1f1b"
    LOOPED_BFS = "looped_bfs"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"


def schedule(
    *,
    kind: Annotated[ScheduleName, typer.Option("--kind", help="Schedule.")],
    pp: Annotated[int, typer.Option("--pp", min=1, max=65536, help="Pipeline ranks.")],
    vpp: Annotated[int | None, typer.Option("--vpp", min=1, max=65536, help="Slots per rank; default: the schedule's minimum.")] = None,
    microbatches: Annotated[int, typer.Option("--microbatches", min=1, max=10**6, help="Microbatches of one step.")],
    forward: Annotated[int, typer.Option("--forward", min=0, max=10**12, help="Time of F: the forward of one microbatch on one slot.")] = 1,
    input_: Annotated[int, typer.Option("--input", min=0, max=10**12, help="Time of I: the input gradients of one backward.")] = 1,
    weight: Annotated[int, typer.Option("--weight", min=0, max=10**12, help="Time of W: the weight gradients of one backward.")] = 1,
    p2p: Annotated[int, typer.Option("--p2p", min=0, max=10**12, help="Time of one transfer between two ranks.")] = 0,
    hidden: Annotated[int, typer.Option("--hidden", min=0, max=100, help="Percent of the shorter action that an overlap hides.")] = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the orders as CSV that torch's pipelining schedules load.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print a pipeline schedule: each rank's order of computations, microbatches in flight, and idle time."""
    from megaplan.cli.problems import refuse  # noqa: PLC0415
    from megaplan.cli.step import MAX_PRINTED, num_actions  # noqa: PLC0415
    from megaplan.schedule import SlotTimes, actions, in_flight, replay, schedule_problems  # noqa: PLC0415

    if as_csv and as_json:
        raise refuse("MP480", "--csv and --json cannot be combined", "megaplan schedule --help")
    slots = _default_vpp(kind) if vpp is None else vpp
    if (total := num_actions(pp, slots, microbatches)) > MAX_PRINTED:
        raise refuse(
            "MP480",
            f"--pp {pp}, --vpp {slots}, --microbatches {microbatches}: up to {total:,} actions, above the limit of {MAX_PRINTED:,}",
        )
    if found := schedule_problems(kind.value, pp, slots, microbatches):
        raise MegaplanError([_in_own_words(problem) for problem in found])
    orders = actions(kind.value, pp, slots, microbatches)
    if as_csv:
        output.write("".join(",".join(map(str, order)) + "\n" for order in orders))
        return 0
    times = SlotTimes.equal(pp * slots, forward, input_, weight)
    step = replay(orders, SlotTimes(times.forward, times.input, times.weight, hidden), p2p=p2p)
    vectors = in_flight(kind.value, pp, slots, microbatches)
    if as_json:
        output.write_json(schedule_document(orders, vectors, step))
    else:
        output.write_styled(_lines(kind.value, pp, slots, vectors, step))
    return 0


_OPTIONS = {"schedule.num_microbatches": "--microbatches", "mesh.pp": "--pp", "mesh.vpp": "--vpp", "schedule.kind": "--kind"}


def _in_own_words(problem: Diagnostic) -> Diagnostic:
    """The problem with this command's options in its hints instead of a spec's keys."""
    hints = tuple(hint.removeprefix("--set ") for hint in problem.hints)
    for key, option in _OPTIONS.items():
        hints = tuple(hint.replace(f"{key}=", f"{option} ") for hint in hints)
    return replace(problem, hints=hints, location=Location())


def schedule_document(orders: Orders, vectors: tuple[tuple[InFlight, ...], ...], step: Timeline) -> dict[str, Any]:
    """The JSON document; actions are in torch's notation (`0F3`, `1I0`, `(0F3;3B1)OVERLAP_F_B`)."""
    return {
        "format": FORMAT,
        "ranks": [
            {
                "rank": rank,
                "actions": list(map(str, order)),
                "peak_inflight": max(sum(vector.full) + sum(vector.pending_weight) for vector in held),
                "inflight_vectors": [{"full": list(vector.full), "pending_weight": list(vector.pending_weight)} for vector in held],
                "bubble": bubble,
                "bubble_inside": inside,
            }
            for rank, (order, held, bubble, inside) in enumerate(zip(orders, vectors, step.bubbles, step.bubbles_inside, strict=True))
        ],
        "makespan": step.makespan,
    }


def _default_vpp(kind: ScheduleName) -> int:
    single = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED_ZERO_BUBBLE)
    return 1 if kind in single else 2


def _lines(kind: str, pp: int, vpp: int, vectors: tuple[tuple[InFlight, ...], ...], step: Timeline) -> Iterator[tuple[str, str]]:
    from megaplan.cli.header import counted  # noqa: PLC0415
    from megaplan.cli.timeline import MAX_SLOTS, drawing, legend  # noqa: PLC0415
    from megaplan.schedule import placement  # noqa: PLC0415
    from megaplan.terminal.table import table, wrap  # noqa: PLC0415

    where = placement(kind)
    yield f"{kind}, {where} placement: {counted(pp, 'rank')} of {counted(vpp, 'slot')}, {step.makespan:,} units per step", "bold"
    yield "", ""
    rows = [["pp", "peak in flight", "bubble", "between its actions"]]
    for rank, held in enumerate(vectors):
        peak = max(sum(vector.full) + sum(vector.pending_weight) for vector in held)
        rows.append([str(rank), str(peak), f"{step.bubbles[rank]:,}", f"{step.bubbles_inside[rank]:,}"])
    yield from ((line, "") for line in table(rows))
    text = "peak in flight: microbatches on all chunks of the rank, from the start of F to the end of B or W"
    yield from ((line, "") for line in wrap(text, indent="  "))
    yield "", ""
    if pp * vpp > MAX_SLOTS:
        yield f"{pp * vpp} slots are too many to draw", ""
        return
    yield from ((line, "") for line in (*drawing(step, where, pp, pp * vpp), *legend(step)))
