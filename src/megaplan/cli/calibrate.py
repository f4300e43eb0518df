"""`megaplan calibrate`: the share of the peak that your device's matrix products reach, fitted to measured steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import AsJson, Overrides
from megaplan.diagnostics import refuse
from megaplan.terminal import output
from megaplan.terminal.output import StyledLine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaplan.layout.calibrate import Calibration, Residual

FORMAT = "megaplan.calibration/1"
LEAST_SHOWN = 0.01
"""Share of a step from which a term is printed."""


def calibrate(
    rows: Annotated[
        str,
        typer.Argument(
            metavar="ROWS|SPEC|RUN|SPECS",
            help='JSON or YAML: [{"spec": FILE, "set": [KEY=VALUE, …], "step_seconds": 1.2}, …]; CSV with columns spec, step_seconds'
            " and keys of the spec; with --step-seconds a spec or plan; the folder that megarun train --out wrote;"
            " or, with --profile, the folder of what its runs trained.",
        ),
    ],
    *,
    step_seconds: Annotated[
        float | None, typer.Option("--step-seconds", metavar="SECONDS", help="Measured seconds per optimizer step of SPEC.")
    ] = None,
    overrides: Overrides = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Results of profiled steps of megarun: write the rates that each kind of kernels reaches, as a device's constants.",
        ),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Held-out results: no constant of --profile is fitted to them, but their errors widen the interval; repeatable.",
        ),
    ] = None,
    changed: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Kernels that changed after the runs of --profile, with their times before and after."),
    ] = None,
    target: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="File to write the shares to; - for stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> int:
    """Fit the share of the peak that matrix products reach to measured steps, and print the error of each by term."""
    if profile is not None:
        return _profiled(rows, profile, held_out or [], changed, target, force=force, as_json=as_json)
    from megaplan.api.measured import measured_steps  # noqa: PLC0415
    from megaplan.layout.calibrate import calibrations  # noqa: PLC0415

    if overrides and step_seconds is None:
        raise refuse("MP487", "--set applies to a spec with --step-seconds", "--step-seconds 1.2", 'or "set": ["KEY=VALUE"] in a row')
    found = calibrations(measured_steps(rows, step_seconds, tuple(overrides or ())))
    document = {"format": FORMAT, "calibrations": [_document(each) for each in found]}
    if target is not None:
        import json  # noqa: PLC0415

        write_new(target, json.dumps(document, indent=2) + "\n", force=force)
    if as_json:
        output.write_json(document)
    elif target != STDOUT:
        output.write_styled(_lines(found))
    return 0


def _profiled(specs: str, results: str, held_out: list[str], changed: str | None, target: str | None, *, force: bool, as_json: bool) -> int:
    """A device's measured constants from profiled steps."""
    from megaplan.api.profiled import measured_constants  # noqa: PLC0415
    from megaplan.layout.profile import text_of  # noqa: PLC0415

    found = measured_constants(specs, results, held_out, changed)
    if target is not None:
        write_new(target, text_of(found), force=force)
    if as_json:
        output.write_json(found)
    elif target != STDOUT:
        output.write_styled(_profile_lines(found))
    return 0


def _profile_lines(found: dict[str, Any]) -> Iterator[StyledLine]:
    from megaplan.terminal.table import table  # noqa: PLC0415

    yield f"{found['device']}: {len(found['kinds'])} kinds of kernels measured, from {', '.join(found['about'].values())}", "bold"
    rows = [["kind", "reaches", "spread", "runs"]]
    for name, kind in found["kinds"].items():
        reached = f"{100 * kind['share']:.1f} %" if "share" in kind else f"{kind['step_ns']:,} ns a step"
        rows.append([name, reached, f"{100 * kind['spread']:.0f} %", str(len(kind["runs"]))])
    yield from ((line, "") for line in table(rows, indent="  "))
    for name, change in found.get("changed", {}).items():
        yield (
            f"  {name} takes {change['factor']:.3f} of that since its kernels changed, {change['basis']}: {'; '.join(change['sources'])}",
            "",
        )
    host = found["host"]
    yield f"  host: {host['issue_ns']:,} ns a launch of forward and backward, {host['update_ns']:,} ns an operation of the update", ""
    rows = [["step", "measured", "modelled", "without it"]]
    for name, row in found["runs"].items():
        errors = (f"{100 * (row[key] / row['measured'] - 1):+.1f} %" for key in ("modelled", "without it"))
        rows.append([name, f"{row['measured']:.3f} s", *errors])
    yield from ((line, "") for line in table(rows, indent="  "))
    low, high = found["interval"]
    yield f"  80 % interval: {low:.3f} to {high:.3f} of the modelled step", ""


def _document(found: Calibration) -> dict[str, Any]:
    return {
        "device": found.device,
        "reached": {found.dtype: round(found.after, 4)},
        "before": round(found.before, 4),
        "spread": round(found.spread, 4),
        **({} if found.factor == 1 else {"step_factor": round(found.factor, 4), "host": found.host}),
        "rows": [_row(each) for each in found.residuals],
    }


def _row(found: Residual) -> dict[str, Any]:
    terms = {
        name: {
            "seconds_before": round(term.before, 6),
            "seconds_after": round(term.after, 6),
            "factor": None if term.factor is None else round(term.factor, 3),
        }
        for name, term in found.terms.items()
    }
    return {"name": found.name, "error_before": round(found.before, 4), "error_after": round(found.after, 4), "terms": terms}


def _lines(found: tuple[Calibration, ...]) -> Iterator[StyledLine]:
    from megaplan.terminal.table import table  # noqa: PLC0415

    for each in found:
        yield f"{each.device}, {each.dtype}: products reach {each.after:.3f} of the peak, ± {100 * each.spread:.0f} %", "bold"
        yield f"  default: {each.before:.3f}", ""
        if each.factor != 1:
            yield f"  whole steps of {each.host} take {each.factor:.3f} of the modelled time: no constant covers this host and device", ""
        rows = [["measured step", "error before", "after"]]
        rows += [[row.name, f"{100 * row.before:+.1f} %", f"{100 * row.after:+.1f} %"] for row in each.residuals]
        yield from ((line, "") for line in table(rows, indent="  "))
        yield from _by_term(max(each.residuals, key=lambda row: abs(row.after)), several=len(each.residuals) > 1)
        factor = "" if each.factor == 1 else f", step_factor: {each.factor:.3f}"
        yield f"  device: {{name: {each.device}, reached: {{{each.dtype}: {each.after:.3f}}}{factor}}}", ""


def _by_term(row: Residual, *, several: bool) -> Iterator[StyledLine]:
    """The terms of the step with the largest error, each with the value that would make the modelled step equal the measured one."""
    from megaplan.terminal.table import table  # noqa: PLC0415
    from megaplan.units import format_ns  # noqa: PLC0415

    total = sum(term.after for term in row.terms.values())
    shown = {name: term for name, term in row.terms.items() if term.after >= LEAST_SHOWN * total}
    if not shown:
        return
    yield f"  terms of {row.name}{', which is farthest off; --json has all' if several else ''}", ""
    yield "  times: factor of this one term that would give the measured step", ""
    rows = [["term", "before", "after", "times"]]
    for name, term in sorted(shown.items(), key=lambda item: -item[1].after):
        factor = "-" if term.factor is None else f"{term.factor:.2f}"
        rows.append([name, *(format_ns(round(seconds * 1e9)) for seconds in (term.before, term.after)), factor])
    yield from ((line, "") for line in table(rows, indent="  "))
