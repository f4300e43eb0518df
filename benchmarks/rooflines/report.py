"""Output of a roofline as a table, as JSON and as a section of the page."""

from collections.abc import Iterator, Sequence
from typing import Any

from rooflines.step import Roofline, Row

HEADER = ("part", "operation", "runs as", "GB", "TFLOP", "launches", "ms", "share", "× ideal bytes")
SHOWN_SHARE = 0.002
"""Rows with a smaller share of the time are summed in one line of the table; JSON has all rows."""


def document(found: Roofline) -> dict[str, Any]:
    """JSON of one job; `ops` has totals of a step over all ranks of one pipeline."""
    floor = found.floor
    return {
        "name": found.name,
        "mfu_ceiling": found.mfu,
        "step_seconds_floor": floor.seconds,
        "launches_per_microbatch": found.launches,
        "host_syncs": found.syncs,
        "longest_rank": {
            "pp_rank": floor.rank,
            "busy_seconds": floor.busy,
            "bubble_seconds": floor.bubble,
            "exposed_collective_seconds": floor.exposed,
        },
        "ops": [
            {
                "op": row.op,
                "family": row.family,
                "inside": row.inside,
                "bytes": round(row.num_bytes),
                "ideal_bytes": round(row.ideal_bytes),
                "flops": round(row.flops),
                "launches": round(row.launches),
                "seconds": row.seconds,
                "launch_seconds": row.launching,
                "overlapped_seconds": row.overlapped,
            }
            for row in found.rows
        ],
    }


def lines(found: Roofline) -> Iterator[str]:
    """Table and summary for a terminal."""
    rows = [HEADER, *table(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    yield ""
    yield from summary(found)


def summary(found: Roofline) -> Iterator[str]:
    """Summary below the table."""
    floor = found.floor
    launching = sum(row.launching for row in found.rows)
    plain = sum(row.seconds for row in found.rows if row.inside == "torch" and row.op.startswith("megakernels."))
    whole = sum(row.seconds for row in found.rows)
    blocking = sum(row.seconds for row in found.rows if row.inside == "network")
    hidden = sum(row.overlapped for row in found.rows)
    yield f"MFU ceiling               {found.mfu:.1%}"
    yield f"step time, lower bound    {floor.seconds:.3f} s"
    yield f"  pipeline rank {floor.rank} busy     {floor.busy:.3f} s, bubble {floor.bubble:.3f} s"
    yield f"  collectives             exposed {floor.exposed:.3f} s of {hidden:.3f} s overlapped; blocking {blocking:.3f} s, all ranks"
    yield f"  launch time             {launching:.3f} s of {whole:.3f} s, all ranks"
    yield f"  plain torch in own ops  {plain:.3f} s, all ranks"
    yield f"launches per microbatch   {found.launches:,}"
    yield f"host syncs per step       {found.syncs}"


def table(found: Roofline) -> list[tuple[str, ...]]:
    """Rows of the table, slowest first, with a last row for all small ones."""
    whole = sum(row.seconds + row.overlapped for row in found.rows)
    shown = [row for row in found.rows if row.seconds + row.overlapped >= SHOWN_SHARE * whole]
    rest = [row for row in found.rows if row.seconds + row.overlapped < SHOWN_SHARE * whole]
    rows = [_cells(row, whole) for row in shown]
    if rest:
        rows.append(_cells(_sum(rest), whole))
    return rows


def page_section(title: str, found: Roofline) -> Iterator[str]:
    """Markdown section of one job."""
    floor = found.floor
    yield f"## {title}"
    yield ""
    yield (
        f"MFU at most **{found.mfu:.1%}**, step time at least {floor.seconds:.3f} s: pipeline rank {floor.rank} is busy for"
        f" {floor.busy:.3f} s, with {floor.bubble:.3f} s of bubble and {floor.exposed:.3f} s of exposed FSDP2 collectives."
        f" {found.launches:,} launches per microbatch, {found.syncs} host synchronisations per step."
    )
    yield ""
    yield f"| {' | '.join(HEADER)} |"
    yield f"|{'---|' * 3}{'---:|' * (len(HEADER) - 3)}"
    for row in table(found):
        yield f"| {' | '.join(row)} |"
    yield ""


def _cells(row: Row, whole: float) -> tuple[str, ...]:
    seconds = row.seconds + row.overlapped
    ratio = f"{row.num_bytes / row.ideal_bytes:.1f}" if row.ideal_bytes and row.inside != "network" else ""
    runs = {"network": "collective", "": ""}.get(row.inside, row.inside)
    return (
        row.family,
        row.op.removeprefix("megakernels."),
        "collective, overlapped" if row.overlapped else runs,
        f"{row.num_bytes / 1e9:,.1f}",
        f"{row.flops / 1e12:,.2f}",
        f"{row.launches:,.0f}",
        f"{seconds * 1e3:,.2f}",
        f"{seconds / whole:.1%}",
        ratio,
    )


def _sum(rows: Sequence[Row]) -> Row:
    total = Row(f"{len(rows)} others", "all")
    for row in rows:
        total.num_bytes += row.num_bytes
        total.flops += row.flops
        total.launches += row.launches
        total.seconds += row.seconds + row.overlapped
    return total
