"""Two estimates of one subject: the bytes that a changed value costs or saves on the worst rank."""

from collections.abc import Iterator, Sequence
from typing import Any

from megaplan.api.estimate import Estimate
from megaplan.budget.values import Budget, RankBudget
from megaplan.cli.time_text import rate_gain, unlike_steps
from megaplan.columns import Column, Phase
from megaplan.layout.ranks import runs_label, runs_of
from megaplan.layout.step_time import NS, PlannedTime, time_document
from megaplan.terminal.table import table, wrap
from megaplan.units import format_bytes, format_ns

HEADS = ("", "base", "changed", "difference")


def compare_lines(first: Estimate, second: Estimate, changes: Sequence[str]) -> Iterator[str]:
    """Step, rate and MFU; the worst rank of each at its peak: the columns that differ, every phase. States if the cuts differ."""
    here, there = first.budget, second.budget
    ours, theirs = here.worst, there.worst
    yield f"compared with {' '.join(changes)}, each at its largest peak:"
    columns = [(column.replace("_", " "), ours.columns[column], theirs.columns[column]) for column in Column]
    rows = [("peak", ours.peak_bytes, theirs.peak_bytes), ("headroom", ours.headroom_bytes, theirs.headroom_bytes)]
    rows += [row for row in columns if row[1] != row[2]]
    rows += [(phase.replace("_", " "), ours.phases[phase], theirs.phases[phase]) for phase in Phase]
    shown = [(name, format_bytes(one), format_bytes(other), _signed(other - one)) for name, one, other in rows]
    yield from table([HEADS, *_times(first.step_time, second.step_time), *shown], indent="  ")
    before, after = first.step_time, second.step_time
    if not isinstance(before, str) and not isinstance(after, str) and (unlike := unlike_steps(before, after)):
        yield from wrap(f"  {unlike}", indent="  ")
    yield f"  worst ranks: base {_name(ours)}; changed {_name(theirs)}"
    if _cuts(here) != _cuts(there):
        yield "  the cuts differ: each estimate uses the cuts that are optimal for its own costs"


def _times(before: PlannedTime | str, after: PlannedTime | str) -> list[tuple[str, str, str, str]]:
    """Rows of the step; none if one is not timed."""
    if isinstance(before, str) or isinstance(after, str):
        return []
    old, new = (format_ns(round(time.seconds / NS)) for time in (before, after))
    first, then = (time.tokens_per_second_per_device for time in (before, after))
    return [
        ("step", old, new, f"{100 * (after.seconds / before.seconds - 1):+.1f} %"),
        ("tokens/s per device", f"{first:,.0f}", f"{then:,.0f}", f"{100 * rate_gain(before, after):+.1f} %"),
        ("MFU", f"{100 * before.mfu:.1f} %", f"{100 * after.mfu:.1f} %", f"{100 * (after.mfu - before.mfu):+.1f} points"),
    ]


def compare_document(second: Estimate, changes: Sequence[str]) -> dict[str, Any]:
    """The other estimate's step and worst rank: `compared` of `megaplan.estimate/1`."""
    there = second.budget
    worst = there.worst
    return {
        "set": list(changes),
        "time": time_document(second.step_time),
        "fits": there.fits,
        "ranks": list(worst.ranks),
        "peak_bytes": worst.peak_bytes,
        "peak_phase": str(worst.peak_phase),
        "headroom_bytes": worst.headroom_bytes,
        "columns": {column.key: num_bytes for column, num_bytes in worst.columns.items()},
        "phases": {str(phase): num_bytes for phase, num_bytes in worst.phases.items()},
    }


def _name(rank: RankBudget) -> str:
    return runs_label(runs_of(rank.ranks))


def _cuts(budget: Budget) -> list[tuple[int, int]]:
    return [(stage.start, stage.stop) for stage in budget.stages]


def _signed(num_bytes: int) -> str:
    return f"{'+' if num_bytes > 0 else ''}{format_bytes(num_bytes)}"
