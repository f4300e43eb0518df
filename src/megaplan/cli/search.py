"""`megaplan search`: the best layouts of a model on a number of devices."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.cli import completion
from megaplan.cli.options import AsJson, DeviceFile, GlobalBatch, Overrides, Processes, SeqLength, SpecFile
from megaplan.terminal import output
from megaplan.terminal.exit_status import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megaplan.api.search import Search
    from megaplan.cli.search_sizes import Size
    from megaplan.errors import Diagnostic
    from megaplan.exploration.engine import Progress

NOTHING_FITS = 1
DeviceNames = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME[,NAME]",
        help="Device, like h100; the spec's if not given. Several are compared.",
        autocompletion=completion.devices,
    ),
]


class SearchObjective(StrEnum):
    """The quantity that the rows are sorted by."""

    TIME = "time"
    HEADROOM = "headroom"
    TOKENS = "tokens_per_second_per_device"


def search(
    spec: SpecFile,
    *,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="N[,N]", help="Number of devices; the spec's if not given. Several are compared.")
    ] = None,
    device: DeviceNames = None,
    global_batch: GlobalBatch = None,
    seq: SeqLength = None,
    price: Annotated[
        str | None, typer.Option("--price", metavar="PRICE", help="Price of a device hour: 2.5, or by device: h100=2.5,b200=4.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="NAME", help="megarun, megatron or torchtitan; -o writes its launch.", autocompletion=completion.hosts
        ),
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option("--fix", metavar="KEY=VALUE", help="Keep one searched value, like mesh.tp=8; repeatable.")
    ] = None,
    vary: Annotated[
        str, typer.Option("--vary", metavar="WORDS", help="Settings that may change: recompute,schedule,batch,precision,kernels.")
    ] = "recompute,schedule,batch",
    objective: Annotated[SearchObjective, typer.Option("--objective", help="Sort key of the rows.")] = SearchObjective.TIME,
    headroom: Annotated[str, typer.Option("--headroom", metavar="SIZE", help="Memory to keep free on every rank, like 8GiB.")] = "0B",
    top: Annotated[int, typer.Option("--top", metavar="N", help="Number of rows.")] = 10,
    folder: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR", help="Write a plan file for each row.")] = None,
    device_file: DeviceFile = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Time limit; then print the best layout so far, with its gap.")
    ] = 20.0,
    exhaust: Annotated[bool, typer.Option("--exhaust", help="No time limit: search until it is proven that no layout is better.")] = False,
    processes: Processes = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Find the layouts with the shortest step that fit, and why the others lost. Exits 1 if nothing fits.

    The first result takes seconds. The search improves it until a time limit, until it is within 1 % of a bound for all layouts, or until
    the proof.
    """
    from megaplan.api.search import search as searched  # noqa: PLC0415
    from megaplan.cli.search_sizes import batch_of_sizes, sizes_of, with_host  # noqa: PLC0415
    from megaplan.cli.size import refuse_two_values  # noqa: PLC0415

    free = _free_bytes(headroom)
    sizes = sizes_of(devices, device, price)
    length = () if seq is None else (f"batch.seq_length={seq}",)
    for option, stated in (("--seq", length), *(("--device", size.changes) for size in sizes)):
        refuse_two_values(overrides or (), option, stated)
    given = [*(overrides or ()), *length]
    alone = len(sizes) == 1 and host is None  # the search itself then reports that the batch is missing
    batch, notes = (global_batch, ()) if alone else batch_of_sizes(spec, given, sizes, global_batch)
    changes = with_host(spec, given, host)

    def one(size: Size) -> Search:
        return searched(
            *(spec, *changes, *size.changes),
            devices=size.devices,
            global_batch=batch,
            fix=fix or (),
            vary=[word.strip() for word in vary.split(",") if word.strip()],
            objective=objective.value,
            headroom_bytes=free,
            top=top if len(sizes) == 1 else 1,
            device_file=device_file,
            processes=processes,
            seconds=None if exhaust else seconds / len(sizes),
            report=_progress(),
        )

    results = [one(size) for size in sizes]
    _clear_progress()
    _write(sizes, results, folder, notes := notes or results[0].job.read_diagnostics, as_json=as_json)
    output.report(notes)
    if any(found.stopped == "interrupt" for found in results):
        return INTERRUPTED
    return 0 if any(found.rows for found in results) else NOTHING_FITS


def _free_bytes(headroom: str) -> int:
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.units import parse_bytes  # noqa: PLC0415

    try:
        return parse_bytes(headroom)
    except ValueError as error:
        raise refuse("MP489", f"--headroom {headroom}: {error}", "--headroom 8GiB") from None


def _write(sizes: Sequence[Size], results: Sequence[Search], folder: str | None, notes: Sequence[Diagnostic], *, as_json: bool) -> None:
    """Writes the plans, and the answer: that of one search, or a table of several; its JSON has the notes of reading."""
    from megaplan.api.search_json import search_document  # noqa: PLC0415
    from megaplan.cli.search_sizes import sizes_document, sizes_lines  # noqa: PLC0415
    from megaplan.cli.search_text import search_lines  # noqa: PLC0415

    found = {"diagnostics": [each.as_document() for each in notes]}
    if len(results) == 1:
        written = _written(results[0], folder)
        if as_json:
            output.write_json(search_document(results[0], written) | found)
        else:
            output.write_styled(search_lines(results[0], written, sizes[0].price))
        return
    for result in results:
        _written(result, folder and f"{folder}/{result.job.spec.device.name}-{result.devices}")
    if as_json:
        output.write_json(sizes_document(sizes, results) | found)
    else:
        output.write_styled(sizes_lines(sizes, results))


def _written(found: Search, folder: str | None) -> tuple[str, ...]:
    if folder is None:
        return ()
    from megaplan.diagnostics import refuse  # noqa: PLC0415

    try:
        return found.write(folder)
    except OSError as error:
        raise refuse("MP482", f"{folder}: {(error.strerror or type(error).__name__).lower()}", "-o plans", file=folder) from None


def _progress() -> Callable[[Progress], Any]:
    """A line on stderr, rewritten in place; nothing unless stderr is a terminal."""
    import sys  # noqa: PLC0415

    if not sys.stderr.isatty():
        return lambda _: None

    def show(now: Progress) -> None:
        done = f"{now.done:,} of {now.total:,} meshes, " if now.total else ""
        sys.stderr.write(f"\r\x1b[K{_best(now)}; {done}{now.evaluated:,} evaluated")
        sys.stderr.flush()

    return show


def _clear_progress() -> None:
    import sys  # noqa: PLC0415

    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")


def _best(now: Progress) -> str:
    """The best row so far and its gap: `6.003 s: pp1 tp2 dp32, micro-batch 2, at most 3.1 % slower than the best`."""
    if now.best is None:
        return "nothing fits yet"
    layout, gap = now.best.layout, now.gap
    degrees = " ".join(f"{name}{value}" for name in ("pp", "tp", "cp", "ep", "etp") if (value := getattr(layout, name)) > 1)
    data = f"dp{layout.dp_replicate * layout.dp_shard}"
    proof = "" if gap is None else f", at most {100 * gap:.1f} % slower than the best"
    return f"{now.best.step_ns / 1e9:.3f} s: {degrees} {data}, micro-batch {layout.micro_batch}{proof}".replace(":  ", ": ")
