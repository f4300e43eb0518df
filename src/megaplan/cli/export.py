"""`megaplan export`: a plan as another framework's launch file, or its step as a file that a viewer opens."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.cli.files import STDOUT, write_new
from megaplan.cli.options import Overrides, SpecOrPlan
from megaplan.hosts.registry import HOSTS
from megaplan.terminal import output

if TYPE_CHECKING:
    from megaplan.exporters.values import Source

LOSES = 1
CHROME_TRACE, MEMORY_SNAPSHOT = "chrome-trace", "memory-snapshot"
OTHERS = ("fsdp2", "deepspeed", "nanotron", "verl", "nemo-rl", CHROME_TRACE, MEMORY_SNAPSHOT)
"""Frameworks that are not hosts and have an exporter, and the formats of viewers."""
if TYPE_CHECKING:
    Target = str
else:
    Target = StrEnum("Target", [(name, name) for name in (*(name for name, host in HOSTS.items() if host.export), *OTHERS)])


def export(
    subject: SpecOrPlan,
    *,
    host: Annotated[
        Target, typer.Option("--to", help="Target framework; or chrome-trace (Perfetto) or memory-snapshot (pytorch.org/memory_viz).")
    ],
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 without output if the host cannot express the whole plan.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Write a plan for another framework, or a step of it for a viewer. Each key that a framework cannot express is listed."""
    from megaplan.api.load import load  # noqa: PLC0415  (a help text needs no model)
    from megaplan.diagnostics import diagnostic, refuse  # noqa: PLC0415
    from megaplan.errors import Location, Severity  # noqa: PLC0415
    from megaplan.exporters.values import InexpressibleError, Source  # noqa: PLC0415

    if host == MEMORY_SNAPSHOT and target == STDOUT:
        raise refuse("MP480", "--to memory-snapshot writes a binary file", "-o snapshot.pickle")
    given = load(subject, *(overrides or ()))
    source = Source(given.spec, given.inventory, given.layout)
    if host in (CHROME_TRACE, MEMORY_SNAPSHOT):
        _write_step(host, source, target, force=force)
        output.report(given.diagnostics)
        return 0
    from megaplan.exporters.hosts import EXPORTERS  # noqa: PLC0415

    try:
        exported = EXPORTERS[host](source)
    except InexpressibleError as error:
        output.report(error.diagnostics)
        return LOSES
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


def _write_step(host: Target, source: Source, target: str, *, force: bool) -> None:
    if host == CHROME_TRACE:
        from megaplan.exporters.chrome_trace import chrome_trace  # noqa: PLC0415

        write_new(target, chrome_trace(source), force=force)
    else:
        from megaplan.exporters.memory_snapshot import memory_snapshot  # noqa: PLC0415

        write_new(target, memory_snapshot(source), force=force)
    if target != STDOUT:
        output.write(f"wrote {target}\n")
