"""`megaplan project`: a measured run of a few devices, on many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.cli.options import AsJson, Processes
from megaplan.terminal import output
from megaplan.terminal.output import StyledLine

if TYPE_CHECKING:
    from megaplan.api.project import Projection

RANGE = ".."
LARGEST = 2**17


def project(
    metrics: Annotated[
        str,
        typer.Argument(metavar="RUN|ROWS", help="The folder that megarun train --out wrote; or JSON rows, as megaplan calibrate reads."),
    ],
    *,
    to: Annotated[str, typer.Option("--to", metavar="NUMBERS", help="Devices: 64..4096, each twice the one before; or 64,256,1024.")],
    keep_layout: Annotated[bool, typer.Option("--keep-layout", help="Enlarge only the data axis, instead of a search.")] = False,
    processes: Processes = None,
    as_json: AsJson = False,
) -> int:
    """Project a measured run to more devices: its step fixes the rates, and the plan is searched again at each number of devices."""
    from megaplan.api.project import project as projected  # noqa: PLC0415

    found = projected(metrics, numbers(to), keep_layout=keep_layout, processes=processes)
    if as_json:
        output.write_json(found.to_dict())
    else:
        output.write_styled(_lines(found))
    return 0


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of `64..4096`, each twice the one before, or of `64,256`.

    Raises:
        MegaplanError: MP473: the text is not a list of numbers or a range.
    """
    from megaplan.diagnostics import refuse  # noqa: PLC0415

    parts = text.split(RANGE) if RANGE in text else text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= LARGEST for part in parts) or (RANGE in text and len(parts) != 2):
        raise refuse(
            "MP473", f"--to {text}: numbers from 1 to {LARGEST:,} must be separated by commas, or two of them by {RANGE}", "--to 64..4096"
        )
    given = tuple(int(part) for part in parts)
    if RANGE not in text:
        return given
    first, last = given
    return tuple(first << power for power in range(LARGEST.bit_length()) if first << power <= last)


def _lines(found: Projection) -> Iterator[StyledLine]:
    from megaplan.cli.run_text import format_seconds  # noqa: PLC0415
    from megaplan.terminal.table import table, wrap  # noqa: PLC0415
    from megaplan.units import format_gib  # noqa: PLC0415

    yield f"{found.name}: measured on {found.devices:,} {found.device}, {format_seconds(found.measured_seconds)} per step", "bold"
    shares = f"{found.dtype} products reach {found.share:.3f} of the peak, {found.share_before:.3f} by the constants"
    text = f"{shares}; the model then predicts {format_seconds(found.modelled_seconds)}"
    yield from ((line, "") for line in wrap(text, indent="  "))
    yield "", ""
    rows = [["devices", "step", "80 % interval", "tok/s/dev", "efficiency", "peak GiB", "free"]]
    for point in found.points:
        times = (format_seconds(point.step_seconds), f"{format_seconds(point.low)} to {format_seconds(point.high)}")
        memory = (format_gib(point.peak_bytes), format_gib(point.headroom_bytes))
        rows.append(
            [f"{point.devices:,}", *times, f"{point.tokens_per_second_per_device:,.0f}", f"{100 * point.efficiency:.1f} %", *memory]
        )
    yield from ((line, "") for line in table(rows, indent="  "))
    yield "", ""
    for point in found.points:
        yield from ((line, "") for line in wrap(f"{point.devices:,}: {' '.join(point.layout) or 'as measured'}", indent="    "))
