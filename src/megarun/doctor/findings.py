"""Findings of the doctor: lines of sections, each good, a warning or a problem with its fix."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

FORMAT = "megarun.doctor/1"


class State(StrEnum):
    """Effect of a finding on training."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        section: Section of the report.
        name: Name of the checked item.
        state: Effect on training.
        text: Text of the finding.
        advice: Advice; empty if there is nothing to do.
        values: The same as plain values.
    """

    section: str
    name: str
    state: State
    text: str
    advice: str
    values: dict[str, Any]


def ok(section: str, name: str, text: str, /, **values: Any) -> Finding:
    """Nothing is wrong."""
    return Finding(section, name, State.OK, text, "", values)


def warning(section: str, name: str, text: str, advice: str, /, **values: Any) -> Finding:
    """A finding with which a run starts but is slower, larger or at risk."""
    return Finding(section, name, State.WARNING, text, advice, values)


def problem(section: str, name: str, text: str, advice: str, /, **values: Any) -> Finding:
    """A run does not start, or computes wrong values."""
    return Finding(section, name, State.PROBLEM, text, advice, values)


def document(findings: Iterable[Finding]) -> dict[str, Any]:
    """The document of `--json`."""
    found = list(findings)
    counts = {str(state): sum(each.state is state for each in found) for state in State}
    return {"format": FORMAT, "counts": counts, "findings": [{**asdict(each), "state": str(each.state)} for each in found]}


def lines(findings: Iterable[Finding]) -> list[str]:
    """The findings as text, by section, and their number."""
    found, shown = list(findings), []
    section = ""
    for each in found:
        if each.section != section:
            section = each.section
            shown.append(section)
        shown.append(f"  {each.state:<8} {each.name}: {each.text}")
        if each.advice:
            shown.append(f"  {'':<8} → {each.advice}")
    counts = document(found)["counts"]
    shown.append(", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1)}" for name in ("problem", "warning")))
    return shown
