"""The result of a search as JSON (`megaplan.search/1`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaplan.exploration.report import LayoutRow

FORMAT = "megaplan.search/1"


def search_document(found: Any, written: Sequence[str]) -> dict[str, Any]:
    """The document of a search (`megaplan.Search`); `written` are the plan files of its rows, if any."""
    return {
        "format": FORMAT,
        "spec": found.job.spec.name,
        "devices": found.devices,
        "objective": found.objective,
        "complete": found.complete,
        "stopped": found.stopped or None,
        "seconds": found.seconds,
        "not_looked_at": {str(pp): count for pp, count in found.not_looked_at.items()} if not found.complete else {},
        "basis": found.basis,
        "candidates": {"meshes": found.num_layouts, "evaluated": found.num_evaluated},
        "bound_seconds": round(found.bound_seconds, 9),
        "gap": None if found.gap is None else round(found.gap, 6),
        "gap_reason": found.gap_reason,
        "robustness": {
            "cases": len(found.robustness.cases),
            "not_timed": found.robustness.num_untimed,
            "first_is_best": found.robustness.num_kept,
            "lost": [
                {"case": case.name, "best": case.best + 1, "loss": round(case.loss, 6)} for case in found.robustness.cases if case.best
            ],
        },
        "best": [_row(found, row, written[index] if written else None) for index, row in enumerate(found.rows)],
        "diagnostics": [each.as_document() for each in found.job.read_diagnostics],
        "fewest": _fewest(found),
        "why_not": [
            {"class": one.name, "count": one.count, "reason": one.reason, "detail": one.detail, "example": one.example}
            for one in found.why_not
        ],
    }


def _fewest(found: Any) -> dict[str, Any] | None:
    fewest = found.fewest
    return None if fewest is None else {"devices": fewest.devices, "row": _row(found, fewest.row, None)}


def _row(found: Any, row: LayoutRow, plan: str | None) -> dict[str, Any]:
    return {"plan": plan, **row.to_dict(), "command": found.command(row)}
