"""The committed table of traced cells, read back: what need not be traced again because nothing that decides it has changed.

A row holds what one cell was estimated at when it was traced. A rank whose estimate is another today, or that is not there, is stale:
the committed page says nothing about it. A changed runtime under an unchanged estimate is seen by tracing alone.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

from matrix import Case

from megaplan.budget.values import RankBudget
from megaplan.columns import Column, Phase
from megarun.trace.values import RankTrace

FIELDS = ("plan", "rank", "phase", "column", "estimate_bytes", "trace_bytes")

Cells = dict[tuple[Phase, Column], tuple[int, int]]
Recorded = dict[str, dict[int, Cells]]
"""(Estimate, trace) of every cell that is not 0 on both sides, by plan and rank."""


def read(table: Path) -> Recorded:
    """The committed cells.

    Raises:
        ValueError: The file has other columns than this script writes, or a cell that is not a number.
    """
    found: Recorded = {}
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != FIELDS:
            raise ValueError(f"{table} has the columns {reader.fieldnames}, not {', '.join(FIELDS)}; write it again with `make accuracy`")
        for row in reader:
            cells = found.setdefault(row["plan"], {}).setdefault(int(row["rank"]), {})
            cells[Phase(row["phase"]), Column(row["column"])] = int(row["estimate_bytes"]), int(row["trace_bytes"])
    return found


def estimated(budget: RankBudget) -> dict[tuple[Phase, Column], int]:
    """Today's estimate of the cells that a trace shows: all except the allocator's overhead."""
    return {(phase, column): size for phase in Phase for column, size in budget.cells[phase].items() if column is not Column.OVERHEAD}


def _is_stale(budget: RankBudget, cells: Cells | None) -> bool:
    """True if the table has no such rank, or one with another estimate."""
    return cells is None or any(size != cells.get(cell, (0, 0))[0] for cell, size in estimated(budget).items())


def trace_of(rank: int, budget: RankBudget, cells: Cells | None) -> RankTrace | None:
    """The recorded trace of a rank, or None if it is stale; the table has no host memory, so a rank with some is always traced."""
    if cells is None or _is_stale(budget, cells) or budget.host.total:
        return None
    traced = {phase: {column: cells.get((phase, column), (0, 0))[1] for column in Column} for phase in Phase}
    return RankTrace(rank, traced, rows={}, kept=(), differences=(), num_events=0)


def stale(cases: Iterable[Case], recorded: Recorded) -> list[str]:
    """Plans of which a distinct rank is not in the table with today's estimate."""
    found = []
    for case in cases:
        ranks = {budget.ranks[0]: budget for budget in case.budget.ranks}
        cells = recorded.get(case.name, {})
        if set(cells) != set(ranks) or any(_is_stale(budget, cells.get(rank)) for rank, budget in ranks.items()):
            found.append(case.name)
    return found
