"""Results as Python shows them: a summary of a few lines, a table for notebooks, a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megaplan.foreign import xml
from megaplan.layout.runs import runs_label, runs_of
from megaplan.layout.step_time import PlannedTime
from megaplan.units import format_bytes

if TYPE_CHECKING:
    from megaplan.budget.values import RankBudget

_MOST_RANKS = 8
"""Groups of ranks that a table shows; those with lower peaks are counted."""


def summary(found: Any) -> str:
    """`qwen3: 64 x h100-sxm, fits: peak 63.16 GiB, headroom 13.62 GiB; step 0.955 s, 17,158 tokens/s a device, MFU 40.0 %`."""
    spec, step = found.job.spec, found.step_time
    verdict = "fits" if found.fits else "DOES NOT FIT"
    peak = f"peak {format_bytes(found.peak_bytes)}, headroom {format_bytes(found.headroom_bytes)}"
    time = "step not timed"
    if isinstance(step, PlannedTime):
        time = f"step {step.seconds:.3g} s, {step.tokens_per_second_per_device:,.0f} tokens/s a device, MFU {100 * step.mfu:.1f} %"
    return f"{spec.name}: {spec.mesh.world_size:,} x {spec.device.name}, {verdict}: {peak}; {time}"


def html(found: Any) -> str:
    """The summary as a paragraph, and a table with a row for each column of the budget and a column for each group of equal ranks."""
    shown = found.ranks[:_MOST_RANKS]
    rest = len(found.ranks) - len(shown)
    names = [column for column in shown[0].columns if any(rank.columns.get(column) for rank in shown)]
    rows = [
        _row("th", ("", *(runs_label(runs_of(rank.ranks)) for rank in shown))),
        *(_row("td", (str(column), *(format_bytes(rank.columns.get(column, 0)) for rank in shown))) for column in names),
        _row("th", ("peak", *(format_bytes(rank.peak_bytes) for rank in shown))),
        _row("td", ("headroom", *(format_bytes(rank.headroom_bytes) for rank in shown))),
        _row("td", ("fits", *("yes" if rank.fits else "NO" for rank in shown))),
    ]
    more = f"<p>and {rest} groups of ranks with lower peaks</p>" if rest else ""
    return f"<p>{xml(summary(found))}</p><table>{''.join(rows)}</table>{more}"


def frame(found: Any) -> Any:
    """A DataFrame with a row for each group of equal ranks.

    Raises:
        ImportError: pandas is not installed.
    """
    from importlib import import_module  # noqa: PLC0415

    try:
        pandas = import_module("pandas")
    except ImportError:
        raise ImportError("to_frame() needs pandas: pip install pandas; to_dict() needs nothing") from None
    return pandas.DataFrame([dict(_cells(rank)) for rank in found.ranks])


def _cells(rank: RankBudget) -> Iterator[tuple[str, Any]]:
    yield "ranks", runs_label(runs_of(rank.ranks))
    yield from ((column.key, size) for column, size in rank.columns.items())
    yield "peak_bytes", rank.peak_bytes
    yield "headroom_bytes", rank.headroom_bytes
    yield "fits", rank.fits


def _row(tag: str, cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"<tr><th>{xml(first)}</th>{''.join(f'<{tag}>{xml(cell)}</{tag}>' for cell in others)}</tr>"
