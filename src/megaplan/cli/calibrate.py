"""`megaplan calibrate`: the share of the peak that your device's matrix products reach, fitted to measured steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import AsJson
from megaplan.terminal import output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaplan.layout.calibrate import Calibration, MeasuredStep

FORMAT = "megaplan.calibration/1"
SHORTEST, LONGEST = 1e-6, 1e6
"""Seconds of a step that was measured."""


def calibrate(
    rows: Annotated[str, typer.Argument(metavar="ROWS", help='JSON: [{"spec": FILE, "set": [KEY=VALUE, …], "step_seconds": 1.2}, …].')],
    *,
    target: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the shares here; - for stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> int:
    """Fit the share of the peak that matrix products reach to measured steps, and print the error of each before and after."""
    from megaplan.layout.calibrate import calibrations  # noqa: PLC0415

    found = calibrations(_steps(rows))
    document = {"format": FORMAT, "calibrations": [_document(each) for each in found]}
    if target is not None:
        import json  # noqa: PLC0415

        write_new(target, json.dumps(document, indent=2) + "\n", force=force)
    if as_json:
        output.write_json(document)
    elif target != STDOUT:
        output.write_styled(_lines(found))
    return 0


def _steps(path: str) -> list[MeasuredStep]:
    """The measured steps of a file.

    Raises:
        MegaplanError: MP487, the file has no such rows, or the time of a spec cannot be modelled.
    """
    import json  # noqa: PLC0415

    from megaplan.api.load import load  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.layout.calibrate import MeasuredStep  # noqa: PLC0415
    from megaplan.layout.step_time import planned_workload  # noqa: PLC0415
    from megaplan.spec.read import read_text  # noqa: PLC0415

    form = '[{"spec": "spec.yaml", "set": ["host.name=megatron"], "step_seconds": 1.2}]'
    try:
        rows: Any = json.loads(read_text(path))
    except ValueError as error:
        raise refuse("MP487", f"{path} is not JSON: {error}", form) from None
    if not isinstance(rows, list) or not rows:
        raise refuse("MP487", f"{path} has no list of measured steps", form)
    found = []
    for number, row in enumerate(rows):
        seconds: Any = row.get("step_seconds") if isinstance(row, dict) else None
        timed = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and SHORTEST <= seconds <= LONGEST
        if not timed or not isinstance(row.get("spec"), str):
            needed = f"a row has spec, and step_seconds from {SHORTEST:g} to {LONGEST:g}"
            raise refuse("MP487", f"row {number} of {path} = {json.dumps(row)[:80]}, and {needed}", form)
        changes = row.get("set") or []
        if not isinstance(changes, list) or not all(isinstance(text, str) for text in changes):
            raise refuse("MP487", f"set of row {number} of {path} = {json.dumps(changes)[:80]}, and it is a list of KEY=VALUE", form)
        given = load(row["spec"], *changes)
        work = planned_workload(given.spec, given.spans)
        if isinstance(work, str):
            raise refuse("MP487", f"row {number} of {path}: no step time for {row['spec']}: {work}", '"set": ["host.name=megatron"]')
        found.append(MeasuredStep(f"row {number}, {given.spec.name}", work, float(seconds)))
    return found


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
