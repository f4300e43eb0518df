"""The page of other people's runs, `docs/reference/unseen-runs.md`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median

from unseen.compare import ROWS, Compared, is_wrong, outside

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/unseen-runs.md"
INTRODUCTION = ROWS.with_name("introduction.md")
Some = Sequence[Compared]


def text(found: Some) -> str:
    """The whole page."""
    tables = {
        "halves": _halves(found),
        "sources": _sources(found),
        "runs": _runs(found),
        "outside": len(outside(found)),
    }
    return INTRODUCTION.read_text(encoding="utf-8").format_map(tables)


def _halves(found: Some) -> str:
    lines = ["| | tuning, as first estimated | tuning | held out, as first estimated | held out |", "|---|---|---|---|---|"]
    halves = [[one for one in found if one.row["held"] is held] for held in (False, True)]
    for name, cell in _CELLS.items():
        cells = [each for half in halves for each in (cell(half, True), cell(half, False))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _errors(some: Some, kind: str, *, first: bool) -> list[float]:
    """Percents of error in memory or time, now or as they were first estimated."""
    if first:
        return [one.row["first"][kind] for one in some if kind in one.row.get("first", {})]
    own = [one.memory_error if kind == "memory" else one.time_error for one in some]
    return [error for error in own if error is not None]


def _summary(errors: Sequence[float]) -> str:
    if not errors:
        return ""
    return f"{mean(map(abs, errors)):.0f} (median {median(errors):+.0f}, {min(errors):+.0f} to {max(errors):+.0f}; {len(errors)})"


def _covered(some: Some, first: bool) -> str:
    inside = [one.row["first"].get("inside") for one in some if "first" in one.row] if first else [one.inside for one in some]
    known = [each for each in inside if each is not None]
    return f"{sum(known)} of {len(known)}"


def _verdicts(some: Some, first: bool) -> str:
    wrong = [is_wrong(one.row, one.row["first"].get("verdict", "") if first else one.verdict) for one in some]
    return f"{sum(wrong)} of {len(wrong)}"


_CELLS: dict[str, Callable[[Some, bool], str]] = {
    "memory, error %": lambda some, first: _summary(_errors(some, "memory", first=first)),
    "time, error %": lambda some, first: _summary(_errors(some, "time", first=first)),
    "times inside the interval": _covered,
    "wrong verdicts on memory": _verdicts,
}


def _sources(found: Some) -> str:
    lines = ["| Source | Half | Memory, error % | Time, error % | Inside | Wrong verdicts |", "|---|---|---|---|---|---|"]
    for group in dict.fromkeys(one.row["group"] for one in found):
        for held in (False, True):
            some = [one for one in found if one.row["group"] == group and one.row["held"] is held]
            if some:
                cells = [_summary(_errors(some, kind, first=False)) for kind in ("memory", "time")]
                lines.append(f"| {group} | {_half(held)} | {' | '.join(cells)} | {_covered(some, False)} | {_verdicts(some, False)} |")
    return "\n".join(lines)


def _runs(found: Some) -> str:
    lines = ["| Run | Half | Memory GiB | Estimate | % | Time s | Estimate | % | Inside | It | Verdict |", "|" + "---|" * 11]
    for one in sorted(found, key=lambda each: -max(abs(each.memory_error or 0), abs(each.time_error or 0))):
        row, memory, time = one.row, one.memory_error, one.time_error
        sizes = [f"{one.measured_gib:.1f}", f"{one.gib:.1f}", f"{memory:+.1f}"] if memory is not None else ["", "", ""]
        seconds = ["", "", one.reason, ""]
        if time is not None and one.time is not None:
            seconds = [f"{one.measured_seconds:.3f}", f"{one.time.seconds:.3f}", f"{time:+.1f}", "yes" if one.inside else "no"]
        happened = "ran" if row.get("ran", True) else "ran out"
        cells = [*sizes, *seconds, happened, one.verdict + (": wrong" if one.wrong else "")]
        lines.append(f"| [{row['name']}]({row['source']}) | {_half(row['held'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _half(held: bool) -> str:
    return "held out" if held else "tuning"
