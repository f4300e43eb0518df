"""`megaplan schedule`: a pipeline schedule without a model: orders, in-flight counts, bubbles, and a drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.cli.options import AsJson
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.schedules.problems import KIND, MICROBATCHES, PP, VPP, Problem
from megaplan.schedules.registry import KINDS, schedule_problems
from megaplan.terminal import output
from megaplan.terminal.output import StyledLine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaplan.api.schedule import Schedule


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}.")
    return kind


def schedule(
    *,
    kind: Annotated[str, typer.Option("--kind", parser=_known, metavar=f"[{'|'.join(KINDS)}]", help="Which schedule.")],
    pp: Annotated[int, typer.Option("--pp", min=1, max=65536, help="Pipeline ranks.")],
    vpp: Annotated[int | None, typer.Option("--vpp", min=1, max=65536, help="Slots per rank; default: the schedule's minimum.")] = None,
    microbatches: Annotated[int, typer.Option("--microbatches", min=1, max=10**6, help="Microbatches of one step.")],
    forward: Annotated[int, typer.Option("--forward", min=0, max=10**12, help="Time of F: the forward of one microbatch on one slot.")] = 1,
    input_: Annotated[int, typer.Option("--input", min=0, max=10**12, help="Time of I: the input gradients of one backward.")] = 1,
    weight: Annotated[int, typer.Option("--weight", min=0, max=10**12, help="Time of W: the weight gradients of one backward.")] = 1,
    p2p: Annotated[int, typer.Option("--p2p", min=0, max=10**12, help="Time of one transfer between two ranks.")] = 0,
    hidden: Annotated[
        int, typer.Option("--hidden", min=0, max=100, help="Percent of the shorter action's time that an overlap hides.")
    ] = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the orders as CSV that torch's pipelining schedules load.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print a pipeline schedule: the computations of each rank in order, its microbatches in flight, and its idle time."""
    from megaplan.api.schedule import default_vpp  # noqa: PLC0415
    from megaplan.api.schedule import schedule as made  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.schedules.actions import MAX_REPLAYED, num_actions  # noqa: PLC0415
    from megaplan.schedules.placement import num_copies  # noqa: PLC0415

    if as_csv and as_json:
        raise refuse("MP480", "--csv and --json both say how to print", "megaplan schedule --help")
    slots = default_vpp(kind) if vpp is None else vpp
    if (total := num_actions(pp, slots, microbatches)) > MAX_REPLAYED:
        raise refuse(
            "MP480",
            f"--pp {pp}, --vpp {slots}, --microbatches {microbatches}: up to {total:,} actions, above the limit of {MAX_REPLAYED:,}",
        )
    if problems := schedule_problems(kind, pp, slots, microbatches):
        raise MegaplanError([_in_own_words(problem) for problem in problems])
    found = made(
        kind, pp=pp, vpp=slots, num_microbatches=microbatches, forward=forward, input=input_, weight=weight, p2p=p2p, hidden=hidden
    )
    if as_csv and num_copies(found.placement) > 1:
        raise refuse("MP480", f"--csv: torch's schedules hold one copy of the model, but {kind} holds two", "--json")
    if as_csv:
        output.write("".join(",".join(map(str, order)) + "\n" for order in found.orders))
    elif as_json:
        output.write_json(found.to_dict())
    else:
        output.write_styled(_lines(found))
    return 0


_OPTIONS = {MICROBATCHES: "--microbatches", PP: "--pp", VPP: "--vpp", KIND: "--kind"}


def _in_own_words(problem: Problem) -> Diagnostic:
    """The problem with hints that name this command's options instead of a spec's keys."""
    hints = [f"{_OPTIONS[key]} {value}" for key, values in problem.remedies for value in values]
    return diagnostic(problem.code, problem.detail, Location(), hints)


def _lines(found: Schedule) -> Iterator[StyledLine]:
    from megaplan.cli.timeline import MAX_SLOTS, drawing, legend  # noqa: PLC0415
    from megaplan.terminal.table import table, wrap  # noqa: PLC0415

    step, num_slots = found.timeline, found.num_slots
    yield f"{found.kind}, {found.placement} placement: {found.pp} ranks of {found.vpp} slots, {step.makespan:,} units per step", "bold"
    yield "", ""
    rows = [["pp", "peak in flight", "bubble", "inside its span"]]
    for rank, (peak, idle, inside) in enumerate(zip(found.peak_in_flight, step.bubbles, step.bubbles_inside, strict=True)):
        rows.append([str(rank), str(peak), f"{idle:,}", f"{inside:,}"])
    yield from ((line, "") for line in table(rows))
    text = "peak in flight: microbatches on all chunks of the rank, from the start of F to the end of B or W"
    yield from ((line, "") for line in wrap(text, indent="  "))
    yield "", ""
    if num_slots > MAX_SLOTS:
        yield f"{num_slots} slots are too many to draw", ""
        return
    yield from ((line, "") for line in (*drawing(step, found.placement, found.pp, num_slots), *legend(step)))
