"""Rank budgets as a table: one row per budget column, one column per distinct rank, worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from megaplan.columns import Column, Phase
from megaplan.layout.ranks import RankRun, joined, runs_label, runs_of
from megaplan.terminal.table import line_width, table, wrap

if TYPE_CHECKING:
    from megaplan.budget.values import RankBudget
    from megaplan.plan.document import RankEstimate

COLUMNS_OF_A_RANK = 20
"""Number of text columns per distinct rank that is shown; the ranks that are not shown have lower peaks."""


class Shown(IntEnum):
    """The unit of a table, chosen by its largest number."""

    MIB = 2**20
    GIB = 2**30

    @property
    def unit(self) -> str:
        """Unit name for the table's header."""
        return "GiB" if self is Shown.GIB else "MiB"

    def text(self, num_bytes: int) -> str:
        """The number in this unit, with two decimals."""
        return f"{num_bytes / self:.2f}"


class RankView(NamedTuple):
    """The data of ranks with equal budgets that the table shows, from a budget or a plan."""

    runs: tuple[RankRun, ...]
    parameters: int
    columns: dict[Column, int]
    phases: dict[Phase, int]
    peak_phase: Phase
    peak_bytes: int
    headroom_bytes: int
    fits: bool

    @property
    def label(self) -> str:
        """`ranks 0-3`."""
        return runs_label(self.runs)


def view_of(rank: RankBudget) -> RankView:
    """The view of a budget's rank."""
    return _view(rank, runs_of(rank.ranks), rank.columns)


def view_of_estimate(rank: RankEstimate) -> RankView:
    """The view of a plan's rank."""
    return _view(rank, rank.ranks, {column: rank.columns[column.key] for column in Column})


def _view(rank: RankBudget | RankEstimate, runs: tuple[RankRun, ...], columns: dict[Column, int]) -> RankView:
    return RankView(runs, rank.parameters, columns, rank.phases, rank.peak_phase, rank.peak_bytes, rank.headroom_bytes, rank.fits)


def rank_table(ranks: Sequence[RankView], *, all_ranks: bool = False) -> Iterator[str]:
    """The table, as wide as a line, and the ranks not shown; with `all_ranks` further tables until every distinct rank is shown."""
    show = Shown.GIB if ranks[0].peak_bytes >= Shown.GIB else Shown.MIB
    left, width = merged(ranks, show), line_width()
    joins = len({(view.peak_bytes, *view.columns.values()) for view in ranks}) > len(left)
    note = f"ranks that differ by less than 0.01 {show.unit} in each number share a column" if joins else ""
    while left:
        shown = left[: max(1, width // COLUMNS_OF_A_RANK)]
        lines = _table(shown, show)
        while len(shown) > 1 and max(map(len, lines)) > width:
            shown.pop()
            lines = _table(shown, show)
        yield from lines
        left = left[len(shown) :]
        if left and not all_ranks:
            names = ", ".join(view.label for view in left[:3]) + (" …" if len(left) > 3 else "")
            text = f"not shown, peak at most {show.text(left[0].peak_bytes)} {show.unit}: {names}; --all-ranks shows them"
            yield from wrap(text, indent="  ", width=width)
            break
        if left:
            yield ""
    if note:
        yield from wrap(note, indent="  ", width=width)


def merged(ranks: Sequence[RankView], show: Shown) -> list[RankView]:
    """Ranks merged that differ by less than the table's precision in every number, as shards do that differ by a few rows.

    The numbers are of the first rank, which has the largest peak.
    """
    views: list[RankView] = []
    for rank in ranks:
        index = next((index for index, view in enumerate(views) if _same_row(rank, view, show)), None)
        if index is None:
            views.append(rank)
        else:
            views[index] = views[index]._replace(runs=joined((*views[index].runs, *rank.runs)))
    return views


def _same_row(one: RankView, other: RankView, show: Shown) -> bool:
    """True if no number of two ranks differs by a hundredth of the table's unit."""
    pairs = [(one.columns[column], other.columns[column]) for column in Column]
    pairs += [(one.peak_bytes, other.peak_bytes), (one.headroom_bytes, other.headroom_bytes)]
    near = all(abs(first - second) * 100 < show for first, second in pairs)
    return (
        near
        and (one.fits, one.peak_phase) == (other.fits, other.peak_phase)
        and abs(one.parameters - other.parameters) * 1000 <= other.parameters
    )


def _table(shown: Sequence[RankView], show: Shown) -> list[str]:
    used = [column for column in Column if any(view.columns[column] for view in shown)]
    heads = [show.unit, *map(str, used), "peak", "headroom", "fits", "peak in", "parameters"]
    lines = table(list(zip(heads, *(_cells(view, used, show) for view in shown), strict=True)))
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1 : 1 + len(used)], rule, *lines[1 + len(used) :]]


def _cells(view: RankView, used: Sequence[Column], show: Shown) -> list[str]:
    """One column of the table."""
    return [
        view.label,
        *(show.text(view.columns[column]) for column in used),
        show.text(view.peak_bytes),
        show.text(view.headroom_bytes),
        "yes" if view.fits else "NO",
        str(view.peak_phase),
        f"{view.parameters:,}",
    ]
