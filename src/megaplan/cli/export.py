"""`megaplan export`: a plan as another framework's launch file."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import Overrides, SpecOrPlan
from megaplan.terminal import output

LOSES = 1


class HostName(StrEnum):
    """Hosts that have an exporter."""

    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    FSDP2 = "fsdp2"
    DEEPSPEED = "deepspeed"
    NANOTRON = "nanotron"
    MAXTEXT = "maxtext"


def export(
    subject: SpecOrPlan,
    *,
    host: Annotated[HostName, typer.Option("--to", help="Target framework.")],
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 without output if the host cannot express all of the plan.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Write a plan for another framework. Each key that the framework cannot express is listed."""
    from megaplan.api.load import load  # noqa: PLC0415  (a help text needs no model)
    from megaplan.diagnostics import diagnostic  # noqa: PLC0415
    from megaplan.errors import Location, Severity  # noqa: PLC0415
    from megaplan.exporters.hosts import EXPORTERS  # noqa: PLC0415
    from megaplan.exporters.values import Source  # noqa: PLC0415

    given = load(subject, *(overrides or ()))
    exported = EXPORTERS[host](Source(given.spec, given.inventory, given.layout))
    found = [
        diagnostic(
            "MP920",
            loss.detail,
            Location(key=loss.key),
            (loss.fix,) if loss.fix else (),
            Severity.WARNING if loss.strict else Severity.NOTE,
        )
        for loss in exported.losses
    ]
    refused = strict and any(loss.strict for loss in exported.losses)
    if not refused:
        write_new(target, exported.text, force=force)
        if target != STDOUT:
            output.write(f"wrote {target}\n")
    output.report(found)
    return LOSES if refused else 0
