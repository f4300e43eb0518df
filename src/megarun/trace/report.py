"""A trace as text and as JSON."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megaplan.spec.models import Mesh
from megaplan.terminal.table import table, wrap
from megaplan.units import format_bytes
from megarun.errors import place
from megarun.trace.compare import Pair, RankComparison

FORMAT = "megaplan.trace/1"
INDENT = "  "


def document(ranks: Iterable[RankComparison]) -> dict[str, Any]:
    """The document of `--json`; columns are of each rank's peak phase, without the allocator's overhead."""
    return {"format": FORMAT, "ranks": [_rank_document(rank) for rank in ranks]}


def _rank_document(rank: RankComparison) -> dict[str, Any]:
    return {
        "rank": rank.trace.rank,
        "estimate_peak_bytes": rank.peak.estimate,
        "trace_peak_bytes": rank.peak.trace,
        "phases": {str(phase): _pair(pair) for phase, pair in rank.phases.items()},
        "reserved": _pair(rank.reserved),
        "host": _pair(rank.host),
        "columns": {column.key: _pair(pair) for column, pair in rank.columns(rank.peak_phase).items()},
    }


def _pair(pair: Pair) -> dict[str, int]:
    return {"estimate": pair.estimate, "trace": pair.trace}


def lines(ranks: Sequence[RankComparison], mesh: Mesh, top: int) -> Iterator[str]:
    """The report: every rank, then a verdict.

    Args:
        ranks: Comparisons in display order.
        mesh: Mesh of the job, for the ranks' coordinates.
        top: Maximum number of differences per rank.
    """
    for rank in ranks:
        yield from _rank_lines(rank, mesh, top)
        yield ""
    worst = max(ranks, key=lambda rank: abs(rank.peak.error))
    past = sum(not rank.within for rank in ranks)
    traced = f"{len(ranks)} rank{'s' * (len(ranks) != 1)} traced; worst error of a peak {_percent(worst.peak)}, rank {worst.trace.rank}"
    yield traced
    yield "every number is within tolerance" if past == 0 else f"{past} of {len(ranks)} above tolerance"


def _rank_lines(rank: RankComparison, mesh: Mesh, top: int) -> Iterator[str]:
    others = len(rank.budget.ranks) - 1
    yield f"{place(rank.trace.rank, mesh)}{f', representing {others} more' if others else ''}"
    yield ""
    rows = [("phase", "estimate", "trace", "error", "")]
    rows += [(str(phase), *_cells(pair), _percent(pair), "" if pair.within else "above tolerance") for phase, pair in rank.phases.items()]
    rows.append(("peak", *_cells(rank.peak), _percent(rank.peak), "" if rank.peak.within else "above tolerance"))
    rows.append(("reserved, replayed", *_cells(rank.reserved), _percent(rank.reserved), ""))
    if rank.host.estimate or rank.host.trace:
        rows.append(("host memory", *_cells(rank.host), _percent(rank.host), "" if rank.host.within else "above tolerance"))
    yield from table(rows, left=(0, 4), indent=INDENT)
    yield ""
    rows = [(f"column, {rank.peak_phase}", "estimate", "trace", "difference", "")]
    for column, pair in rank.columns(rank.peak_phase).items():
        if pair.estimate or pair.trace:
            verdict = "" if rank.column_within(pair) else "above tolerance"
            rows.append((str(column), *_cells(pair), _signed(pair.difference), verdict))
    yield from table(rows, left=(0, 4), indent=INDENT)
    yield from _differences(rank, top)


def _differences(rank: RankComparison, top: int) -> Iterator[str]:
    found = sorted(rank.trace.differences, key=lambda item: -abs(item.estimate - item.trace))
    if found:
        yield ""
        yield f"{INDENT}the ledger and the runtime differ in {len(found)} storage{'s' * (len(found) != 1)}, bytes of one microbatch:"
        for item in found[:top]:
            yield from _row(_signed(item.estimate - item.trace), f"{item.name} ({item.column})")
        if len(found) > top:
            yield f"{INDENT}and {len(found) - top} more: --top {len(found)}"
    for phase, columns in rank.columns_past_tolerance.items():
        for column, pair in columns.items():
            yield ""
            yield f"{INDENT}{column} in {phase} is off by {_signed(pair.difference)}; its largest rows in the trace:"
            for row in [row for row in rank.trace.rows[phase] if row.column is column][:top]:
                yield from _row(format_bytes(row.nbytes), row.describe())


def _row(amount: str, text: str) -> Iterator[str]:
    first, *rest = wrap(text, width=80 - 16)
    yield f"{INDENT}{amount:>12}  {first}"
    yield from (f"{INDENT}{'':12}  {line}" for line in rest)


def _cells(pair: Pair) -> tuple[str, str]:
    return format_bytes(pair.estimate), format_bytes(pair.trace)


def _signed(num_bytes: int) -> str:
    return f"+{format_bytes(num_bytes)}" if num_bytes > 0 else format_bytes(num_bytes)


def _percent(pair: Pair) -> str:
    return f"{pair.error:+.2%}"
