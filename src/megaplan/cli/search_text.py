"""The result of a search as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megaplan.exploration.report import lines_of
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import table, wrap
from megaplan.units import format_gib, format_ns
from megaplan.wording import plural

if TYPE_CHECKING:
    from megaplan.api.search import Search
    from megaplan.exploration.report import LayoutRow

HEAD = ("", "step", "tok/s/dev", "MFU", "peak GiB", "free", "bubble", "comm", "mesh", "")


def search_lines(found: Search, written: Sequence[str], price: float | None = None) -> Iterator[StyledLine]:
    """Rows with their commands, the reasons why other classes of layouts lost, and the certificate."""
    batch = found.job.spec.global_batch_size
    state = {"": "", "interrupt": "; interrupted: the best so far"}.get(found.stopped, "; the best so far")
    yield f"{found.job.spec.name} on {found.devices_text}, {plural(batch, 'sequence')} per step{state}", "bold"
    yield f"{found.num_layouts:,} meshes, {found.num_evaluated:,} exact evaluations", ""
    if batch < found.devices:
        yield from ((line, "bold") for line in wrap(_small_batch(found), indent="  "))
    yield "", ""
    if found.rows:
        yield from ((line, "") for line in table([HEAD, *map(_cells, range(1, len(found.rows) + 1), found.rows)], left=(0, 8, 9), gap=1))
        yield "* no row is as fast with more memory free; bubble and comm: share of the step", ""
        if any(_short(row.exact.layout.kind) != row.exact.layout.kind for row in found.rows if row.exact.layout.pp > 1):
            yield "int: interleaved; zb: zero_bubble", ""
        yield from _peaks(found.rows[0])
        yield "", ""
        if price is not None:
            yield cost_text(found.rows[0], found.devices, price), ""
            yield "", ""
        yield from ((f"{found.command(row)}   # {number}", "") for number, row in enumerate(found.rows, 1))
        yield "", ""
        yield from ((line, "") for line in wrap(_certificate(found), indent="  "))
        yield from ((line, "") for line in wrap(_robustness(found), indent="  "))
    else:
        yield "nothing fits" if found.complete else "nothing that was tried fits", "bold"
        yield from ((line, "bold") for line in _fewest(found))
    if not found.complete:
        yield from ((line, "") for line in wrap(_not_looked_at(found), indent="  "))
    yield "", ""
    yield "why not", "bold"
    yield from ((part, "") for line in lines_of(found.why_not) for part in wrap(line, indent="  "))
    yield "", ""
    yield (f"wrote {', '.join(written)}" if written else "no plans are written; -o DIR writes one for each row"), ""


def _fewest(found: Search) -> Iterator[str]:
    """The smallest number of devices that was found to fit, and with which layout."""
    fewest = found.fewest
    if fewest is None:
        yield "and it does not fit on any of the larger numbers of devices that were tried"
        return
    row = fewest.row
    yield f"{fewest.devices:,} devices are enough, of the numbers tried: {_figures(row)}"
    yield found.command(row)


def _figures(row: LayoutRow) -> str:
    return f"step {format_ns(row.exact.step_ns)}, peak {format_gib(row.peak_bytes, 1)} GiB"


def cost_text(row: LayoutRow, devices: int, price: float) -> str:
    """Cost of an hour, and of a billion tokens at the row's rate."""
    return f"{devices * price:,.2f} an hour, {billion_tokens(row, price):,.2f} for 1 billion tokens, at {price:g} a device hour"


def billion_tokens(row: LayoutRow, price: float) -> float:
    """Cost of a billion tokens at the row's rate, for a price of a device hour."""
    return 1e9 / row.tokens_per_second_per_device / 3600 * price


def _not_looked_at(found: Search) -> str:
    """The meshes that a search left out when it ended early, and the options that continue it."""
    left = found.not_looked_at
    why = {"time": f"after {found.seconds or 0:g} s", "gap": "as the first row is within 1 % of the bound", "interrupt": "when interrupted"}
    text = f"ended {why[found.stopped]}; "
    count = sum(left.values())
    parts = ", ".join(f"pp {pp}: {number:,}" for pp, number in left.items())
    text += f"not evaluated: {count:,} of {found.num_layouts:,} meshes ({parts})" if left else "every mesh was looked at"
    return f"{text}, or some of their schedules; --seconds {3 * (found.seconds or 20):g} searches longer, --exhaust until the proof"


def _small_batch(found: Search) -> str:
    """Note that the batch, which a search keeps, has fewer sequences than devices."""
    spec = found.job.spec
    sequences, devices = spec.global_batch_size, found.devices
    enough = spec.schedule.num_microbatches * -(-devices // sequences)
    kept = f"the search keeps the global batch of {plural(sequences, 'sequence')}"
    most = f"at most {sequences:,} of {devices:,} devices are data ranks"
    return f"{kept}, so {most}; a sequence for each: --set schedule.num_microbatches={enough}"


def _cells(number: int, row: LayoutRow) -> tuple[str, ...]:
    return (
        f"{number}{'*' if row.pareto else ''}",
        format_ns(row.exact.step_ns),
        f"{row.tokens_per_second_per_device:,.0f}",
        f"{100 * row.mfu:.1f}%",
        format_gib(row.peak_bytes, 1),
        format_gib(row.headroom_bytes, 1),
        f"{100 * row.bubble_seconds / row.step_seconds:.1f}%",
        f"{100 * row.exposed_seconds / row.step_seconds:.1f}%",
        *layout_text(row),
    )


def _peaks(row: LayoutRow) -> Iterator[StyledLine]:
    """The first row's peak on each type of device; empty if there is only one type."""
    peaks = [f"{pool.device} {format_gib(pool.peak_bytes, 1)} GiB, {format_gib(pool.headroom_bytes, 1)} free" for pool in row.pools]
    if peaks:
        yield from ((line, "") for line in wrap(f"peaks of the first row: {'; '.join(peaks)}", indent="  "))


def layout_text(row: LayoutRow) -> tuple[str, str]:
    """Mesh, and microbatches with the schedule: `pp2 tp4 dp8`, `mb1x32 1f1b/1`."""
    layout = row.exact.layout
    degrees = ("pp", layout.pp), ("tp", layout.tp), ("cp", layout.cp), ("ep", layout.ep), ("etp", layout.etp)
    mesh = " ".join(f"{name}{value}" for name, value in degrees if value > 1)
    data = f"{layout.dp_replicate}x{layout.dp_shard}" if layout.dp_replicate > 1 else f"{layout.dp_shard}"
    pipeline = "" if layout.pp == 1 else f" {_short(layout.kind)}/{layout.vpp}"
    return f"{mesh} dp{data}".lstrip(), f"mb{layout.micro_batch}x{layout.num_microbatches}{pipeline}"


def _short(kind: str) -> str:
    """A schedule in a row of 80 columns; the changes below the table have its whole name."""
    return kind.replace("interleaved", "int").replace("zero_bubble", "zb")


def _robustness(found: Search) -> str:
    robust = found.robustness
    cases = f"{robust.num_kept} of {len(robust.cases)} changes of one efficiency by 10 % or of routing"
    text = f"the first row stays the best of the rows in {cases}"
    if robust.num_untimed:
        text = f"{text} ({robust.num_untimed} more were not timed within the limit)"
    if (worst := robust.worst) is None:
        return text
    return f"{text}; at most it loses {100 * worst.loss:.1f} % to row {worst.best + 1} ({worst.name})"


def _certificate(found: Search) -> str:
    if found.gap is None:
        return f"no bound of all layouts is known yet. Times: {found.basis}"
    gap, bound = found.gap, format_ns(round(found.bound_seconds * 1e9))
    return (
        f"no layout of this space has a step below {bound}, whatever its policy and cuts: the first row is at most "
        f"{100 * gap:.1f} % slower than the best. Times: {found.basis}"
        + (f". Loose bounds: {found.gap_reason}" if found.gap_reason else "")
    )
