"""A plan diff as JSON (`megaplan.diff/1`)."""

from typing import Any

from megaplan.columns import Column
from megaplan.hosts.registry import HOSTS
from megaplan.layout.step_time import PlannedTime, time_document
from megaplan.plan.diff import Place, PlanDiff, RankChange, ValueChange
from megaplan.plan.document import RankEstimate, SpanField

FORMAT = "megaplan.diff/1"


def diff_document(diff: PlanDiff, times: tuple[PlannedTime | str, PlannedTime | str]) -> dict[str, Any]:
    """Every field of the diff as JSON values, and the step time of both plans."""
    reasons = {column: _pair(before, after) for column, before, after in host_lines(diff)}
    return {
        "format": FORMAT,
        "same": diff.same,
        "verdict": diff.verdict,
        "fits": _pair(*diff.fits),
        "verdicts": _pair(*diff.verdicts),
        "time": _pair(*map(time_document, times)),
        "digests": _pair(*diff.digests),
        "tampered": [{"file": file, "diagnostic": found.as_document()} for file, found in diff.tampered],
        "stale": list(diff.stale),
        "moves": [
            {"layers": [move.start, move.stop], "letters": move.letters, "before": _place(move.before), "after": _place(move.after)}
            for move in diff.moves
        ],
        "owners": [
            {"block": move.block, "before": list(map(_place, move.before)), "after": list(map(_place, move.after))} for move in diff.owners
        ],
        "decisions": list(map(_change, (*diff.decisions, *diff.split))),
        "inputs": list(map(_change, diff.inputs)),
        "training": list(map(_change, diff.training)),
        "other": list(map(_change, diff.other)),
        "ranks": list(map(_rank, diff.ranks)),
        "columns": [
            {
                "column": str(growth.column),
                "before_bytes": growth.before,
                "after_bytes": growth.after,
                "causes": [{"change": key, "bytes": num_bytes} for key, num_bytes in growth.causes],
                "why": reasons.get(str(growth.column)),
            }
            for growth in diff.growth
        ],
    }


def host_lines(diff: PlanDiff) -> list[tuple[str, str, str]]:
    """Every column that differs, with each host's contents of it; empty if the host is the same."""
    hosts = next(((change.before, change.after) for change in diff.inputs if change.key == "host.name"), None)
    if hosts is None:
        return []

    def contents(host: Any, column: Column) -> str:
        return f"{host}: {HOSTS[host].holds[column]}"

    before, after = hosts
    return [(str(growth.column), contents(before, growth.column), contents(after, growth.column)) for growth in diff.growth]


def _pair(before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after}


def _place(place: Place) -> dict[str, int]:
    return {"pp_rank": place[0], "chunk": place[1]}


def _change(change: ValueChange) -> dict[str, Any]:
    return {"key": change.key, "before": change.before, "after": change.after}


def _rank(rank: RankChange) -> dict[str, Any]:
    return {
        "ranks": _expanded(rank.ranks),
        "before": _side(rank.before),
        "after": _side(rank.after),
        "columns": {change.key: _pair(change.before, change.after) for change in rank.columns},
    }


def _expanded(runs: tuple[SpanField, ...]) -> list[int]:
    return [rank for start, stop in runs for rank in range(start, stop)]


def _side(rank: RankEstimate | None) -> dict[str, Any] | None:
    if rank is None:
        return None
    return rank.model_dump(mode="json", include={"coordinate", "peak_bytes", "peak_phase", "headroom_bytes", "fits"})
