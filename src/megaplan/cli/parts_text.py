"""Changes of traffic, run and post-training plan from one plan to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megaplan.cli.run_text import format_seconds, percent
from megaplan.cli.time_text import gigabytes
from megaplan.layout.traffic import AxisTraffic
from megaplan.units import format_gib, short_count

if TYPE_CHECKING:
    from megaplan.api.parts import JobParts
    from megaplan.goodput.values import RunEstimate
    from megaplan.post_training.values import RlEstimate

Rows = list[tuple[str, ...]]
HEADS = ("before", "after", "change")


def part_tables(before: JobParts, after: JobParts) -> Iterator[tuple[str, Rows]]:
    """Title and rows, the first one the head, of each part that changes."""
    for title, rows in (
        ("traffic, GB per rank and step", _traffic(before.traffic, after.traffic)),
        ("whole run", _pairs(_run_cells(before.run), _run_cells(after.run))),
        ("post-training", _pairs(_rl_cells(before.post_training), _rl_cells(after.post_training))),
    ):
        if rows:
            yield title, [("", *HEADS), *rows]


def _traffic(before: Sequence[AxisTraffic], after: Sequence[AxisTraffic]) -> Rows:
    sides = [{f"{row.axis} {row.what}, {row.link}": row.rank_bytes for row in rows} for rows in (before, after)]
    found: Rows = []
    for name in dict.fromkeys((*sides[0], *sides[1])):
        old, new = (side.get(name, 0) for side in sides)
        if old != new:
            found.append((name, gigabytes(old) if old else "none", gigabytes(new) if new else "none", _growth(old, new)))
    return found


Cells = dict[str, tuple[float, str]]


def _run_cells(run: RunEstimate | str | None) -> Cells:
    """Number and text of each figure by name."""
    if run is None or isinstance(run, str):
        return {}
    found = {"tokens": (float(run.tokens), short_count(run.tokens)), "days": (run.days.value, f"{run.days.value:,.1f}")}
    found["device hours"] = run.device_hours.value, f"{run.device_hours.value:,.0f}"
    if run.cost is not None:
        found["cost"] = run.cost.value, f"{run.cost.value:,.0f}"
    return found | {"goodput": (run.goodput, percent(run.goodput))}


def _rl_cells(plan: RlEstimate | str | None) -> Cells:
    if plan is None or isinstance(plan, str):
        return {}
    return {
        "iteration": (plan.iteration_seconds.value, format_seconds(plan.iteration_seconds.value)),
        "tokens/s per device": (plan.tokens_per_second_per_device, f"{plan.tokens_per_second_per_device:,.0f}"),
        "device peak, GiB": (plan.peak_bytes, format_gib(plan.peak_bytes)),
        "host peak, GiB": (plan.host_peak_bytes, format_gib(plan.host_peak_bytes)),
        **{f"{phase.name}, GiB": (phase.total_bytes, format_gib(phase.total_bytes)) for phase in plan.memory},
    }


def _pairs(before: Cells, after: Cells) -> Rows:
    none = (0.0, "none")
    pairs = [(name, before.get(name, none), after.get(name, none)) for name in dict.fromkeys((*before, *after))]
    return [(name, old[1], new[1], _growth(old[0], new[0])) for name, old, new in pairs if old != new]


def _growth(old: float, new: float) -> str:
    return f"{100 * (new / old - 1):+.1f} %" if old and new else "-"
