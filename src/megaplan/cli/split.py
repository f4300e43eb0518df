"""`megaplan split`: find the pipeline stages, and write the plan."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.options import AsJson, CostsFile, DeviceFile, Overrides, SpecFile
from megaplan.terminal import output
from megaplan.terminal.output import StyledLine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaplan.api.split import Split

NO_SPLIT = 1


class SplitMode(StrEnum):
    """The method that chooses the cuts."""

    EQUAL = "equal"
    WEIGHTED = "weighted"
    MANUAL = "manual"


class SplitObjective(StrEnum):
    """The quantity that weighted cuts minimise."""

    BOTTLENECK = "bottleneck"
    STEP_TIME = "step_time"


def split(
    spec: SpecFile,
    *,
    target: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = None,
    mode: Annotated[SplitMode | None, typer.Option("--mode", help="Override the spec's split.mode.")] = None,
    objective: Annotated[SplitObjective | None, typer.Option("--objective", help="Instead of the spec's split.objective.")] = None,
    costs: CostsFile = None,
    device_file: DeviceFile = None,
    baseline: Annotated[str | None, typer.Option("--baseline", metavar="PLAN", help="Of equally good cuts, prefer this plan's.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Cut the model into pipeline stages, with a certificate, and write the plan. Exits 1 if no split is feasible."""
    from megaplan.api.split import InfeasibleError  # noqa: PLC0415
    from megaplan.api.split import split as decided  # noqa: PLC0415
    from megaplan.cli.files import STDOUT, check_target, write_whole  # noqa: PLC0415

    if target is not None and target != STDOUT:
        check_target(target, spec)
    try:
        found = decided(
            *(spec, *(overrides or ())),
            mode=_value(mode),
            objective=_value(objective),
            baseline=baseline,
            costs=costs,
            device_file=device_file,
        )
    except InfeasibleError as error:
        output.fail(error.diagnostics, as_json=as_json)
        return NO_SPLIT
    if target is not None:
        write_whole(target, found.text)
    if target == STDOUT:
        output.report(found.diagnostics)
    elif as_json:
        output.write_json(found.document(target))
    else:
        output.write_styled(_lines(found, target))
        output.report(found.diagnostics)
    return 0


def _value(choice: StrEnum | None) -> Any:
    """The choice as the library names it."""
    return None if choice is None else choice.value


def _lines(found: Split, target: str | None) -> Iterator[StyledLine]:
    from megaplan.cli.header import family_counts  # noqa: PLC0415
    from megaplan.cli.stages_text import certificate_line, stage_lines  # noqa: PLC0415
    from megaplan.cli.time_text import time_lines  # noqa: PLC0415
    from megaplan.terminal.table import wrap  # noqa: PLC0415

    plan, decided = found.plan, found.plan.decisions
    yield f"{plan.spec.name}: {family_counts(decided.pattern.expanded)}", "bold"
    yield from ((line, "") for line in wrap(certificate_line(decided.split.certificate, decided.split.mode), indent="  "))
    if decided.split.reason:
        yield from ((line, "") for line in wrap(f"reason: {decided.split.reason}", indent="  "))
    yield "", ""
    yield from ((line, "") for line in stage_lines(plan))
    yield "", ""
    yield plan.fit_text, ""
    yield from ((line, "") for line in (*time_lines(found.step_time), ""))
    yield from ((line, "") for note in found.notes for line in wrap(note, indent="  "))
    if found.notes:
        yield "", ""
    yield f"wrote {target}" if target else "no plan is written; -o FILE writes it", ""
    yield plan.digests.plan, "dim"
