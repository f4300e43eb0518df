"""`megaplan search`: the best layouts of a model on a number of devices."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli.options import AsJson, DeviceFile, Overrides, SpecFile
from megaplan.terminal import output
from megaplan.terminal.exit_status import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from megaplan.api.search import Search
    from megaplan.exploration.engine import Progress

NOTHING_FITS = 1


class SearchObjective(StrEnum):
    """The quantity that the rows are sorted by."""

    TIME = "time"
    HEADROOM = "headroom"
    TOKENS = "tokens_per_second_per_device"


def search(
    spec: SpecFile,
    *,
    devices: Annotated[int | None, typer.Option("--devices", metavar="N", help="Number of devices; the spec's if not given.")] = None,
    fix: Annotated[
        list[str] | None, typer.Option("--fix", metavar="KEY=VALUE", help="Keep one searched value, like mesh.tp=8; repeatable.")
    ] = None,
    vary: Annotated[
        str, typer.Option("--vary", metavar="WORDS", help="What may differ from the spec: recompute,schedule,batch,precision,kernels.")
    ] = "recompute,schedule,batch",
    objective: Annotated[SearchObjective, typer.Option("--objective", help="What the rows are sorted by.")] = SearchObjective.TIME,
    headroom: Annotated[str, typer.Option("--headroom", metavar="SIZE", help="Memory to keep free on every rank, like 8GiB.")] = "0B",
    top: Annotated[int, typer.Option("--top", metavar="N", help="Number of rows.")] = 10,
    folder: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR", help="Write a plan file for each row.")] = None,
    device_file: DeviceFile = None,
    processes: Annotated[int | None, typer.Option("--processes", metavar="N", help="Number of processes; one per processor.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Find the layouts with the shortest step that fit, and why the others lost. Exits 1 if nothing fits."""
    from megaplan.api.search import search as searched  # noqa: PLC0415
    from megaplan.cli.search_text import search_document, search_lines  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.units import parse_bytes  # noqa: PLC0415

    try:
        free = parse_bytes(headroom)
    except ValueError as error:
        raise refuse("MP489", f"--headroom {headroom}: {error}", "--headroom 8GiB") from None
    words = [word.strip() for word in vary.split(",") if word.strip()]
    found = searched(
        *(spec, *(overrides or ())),
        devices=devices,
        fix=fix or (),
        vary=words,
        objective=objective.value,
        headroom_bytes=free,
        top=top,
        device_file=device_file,
        processes=processes,
        report=_progress(),
    )
    written = _written(found, folder)
    if as_json:
        output.write_json(search_document(found, written))
    else:
        output.write_styled(search_lines(found, written))
    if not found.complete:
        return INTERRUPTED
    return 0 if found.rows else NOTHING_FITS


def _written(found: Search, folder: str | None) -> tuple[str, ...]:
    if folder is None:
        return ()
    from megaplan.diagnostics import refuse  # noqa: PLC0415

    try:
        return found.write(folder)
    except OSError as error:
        raise refuse("MP482", f"{folder}: {(error.strerror or type(error).__name__).lower()}", "-o plans", file=folder) from None


def _progress() -> Callable[[Progress], Any]:
    """A line on stderr, rewritten in place; nothing where no person reads it."""
    import sys  # noqa: PLC0415

    if not sys.stderr.isatty():
        return lambda _: None

    def show(now: Progress) -> None:
        best = "nothing fits yet" if now.best is None else f"best {now.best.step_ns / 1e9:.3f} s"
        sys.stderr.write(f"\r\x1b[K{now.done:,} of {now.total:,} meshes, {now.evaluated:,} evaluated, {best}")
        sys.stderr.write("\r\x1b[K" if now.done >= now.total else "")
        sys.stderr.flush()

    return show
