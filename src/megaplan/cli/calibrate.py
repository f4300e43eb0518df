"""`megaplan calibrate`: the share of the peak that your device's matrix products reach, fitted to measured steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import AsJson
from megaplan.terminal import output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaplan.layout.calibrate import Calibration

FORMAT = "megaplan.calibration/1"


def calibrate(
    rows: Annotated[
        str,
        typer.Argument(
            metavar="ROWS|RUN",
            help='JSON: [{"spec": FILE, "set": [KEY=VALUE, …], "step_seconds": 1.2}, …]; or the folder that megarun train --out wrote.',
        ),
    ],
    *,
    target: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the shares here; - for stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> int:
    """Fit the share of the peak that matrix products reach to measured steps, and print the error of each before and after."""
    from megaplan.api.measured import measured_steps  # noqa: PLC0415
    from megaplan.layout.calibrate import calibrations  # noqa: PLC0415

    found = calibrations(measured_steps(rows))
    document = {"format": FORMAT, "calibrations": [_document(each) for each in found]}
    if target is not None:
        import json  # noqa: PLC0415

        write_new(target, json.dumps(document, indent=2) + "\n", force=force)
    if as_json:
        output.write_json(document)
    elif target != STDOUT:
        output.write_styled(_lines(found))
    return 0


def _document(found: Calibration) -> dict[str, Any]:
    return {
        "device": found.device,
        "reached": {found.dtype: round(found.after, 4)},
        "before": round(found.before, 4),
        "spread": round(found.spread, 4),
        "rows": [{"name": name, "error_before": round(old, 4), "error_after": round(new, 4)} for name, old, new in found.residuals],
    }


def _lines(found: tuple[Calibration, ...]) -> Iterator[tuple[str, str]]:
    from megaplan.terminal.table import table  # noqa: PLC0415

    for each in found:
        yield f"{each.device}, {each.dtype}: products reach {each.after:.3f} of the peak, ± {100 * each.spread:.0f} %", "bold"
        yield f"  default: {each.before:.3f}", ""
        rows = [["measured step", "error before", "after"]]
        rows += [[name, f"{100 * old:+.1f} %", f"{100 * new:+.1f} %"] for name, old, new in each.residuals]
        yield from ((line, "") for line in table(rows, indent="  "))
        yield f"  device: {{name: {each.device}, reached: {{{each.dtype}: {each.after:.3f}}}}}", ""
