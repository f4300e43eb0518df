"""Diagnostics: one shape for every error, warning and note a user can see.

A diagnostic has a fixed summary (no user values), a detail (the equation with every value), a location, and hints that work when
pasted. `Diagnostics` collects them so that all problems of an input are reported together.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from megaplan.foreign import one_line, printable


class Severity(StrEnum):
    """Effect of a diagnostic: an error stops the command, a warning states a consequence, a note informs."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Location(NamedTuple):
    """Position of a diagnostic: file as the user named it, 1-based line and column, dotted key (`mesh.ep`)."""

    file: str | None = None
    line: int | None = None
    column: int | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `summary` is fixed per code (the title of its page in docs/errors); `detail` carries the values."""

    code: str
    severity: Severity
    summary: str
    detail: str = ""
    location: Location = field(default_factory=Location)
    hints: tuple[str, ...] = ()

    def as_document(self) -> dict[str, Any]:
        """The finding as plain values, for JSON."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "summary": self.summary,
            "detail": self.detail,
            "location": self.location._asdict(),
            "hints": list(self.hints),
        }


class MegaplanError(Exception):
    """Raised with every error found in one input; the CLI renders them and exits 2."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("; ".join(f"{d.code}: {d.summary} ({d.detail})" for d in self.diagnostics))

    def __str__(self) -> str:
        """Each finding with its place and hints, as a traceback shows it."""
        return "\n".join(render_diagnostic(found) for found in self.diagnostics)

    def __reduce__(self) -> "tuple[type[MegaplanError], tuple[tuple[Diagnostic, ...]]]":
        return type(self), (self.diagnostics,)  # diagnostics of a rank, which other ranks unpickle


class Diagnostics:
    """A growing list of findings; `raise_errors` ends the collection if any is an error."""

    def __init__(self, found: Iterable[Diagnostic] = ()) -> None:
        self._found = list(found)

    def add(self, diagnostic: Diagnostic) -> None:
        """Append one finding."""
        self._found.append(diagnostic)

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Append several findings."""
        self._found.extend(diagnostics)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that stop a command."""
        return tuple(d for d in self._found if d.severity is Severity.ERROR)

    def raise_errors(self) -> None:
        """Raise `MegaplanError` with all findings, errors first, if there is an error."""
        if self.errors:
            raise MegaplanError((*self.errors, *(d for d in self._found if d.severity is not Severity.ERROR)))

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self._found)


def render_diagnostic(found: Diagnostic) -> str:
    """Plain text of one finding: summary, values, position, hints; the command line only adds colour.

    Values come from files that others wrote: control characters are escaped (`megaplan.foreign`).
    """
    lines = [f"{found.severity}[{found.code}]: {found.summary}"]
    body = [f"  {line}".rstrip() for line in printable(found.detail).split("\n")] if found.detail else []
    place = render_location(found.location)
    if place:
        body.append(f"  --> {place}")
    if body:
        lines += ["", *body]
    if found.hints:
        lines += ["", *(f"hint: {one_line(hint)}" for hint in found.hints)]
    return "\n".join(lines)


def render_location(location: Location) -> str:
    """`file:line: key`, as far as known; empty if nothing is."""
    place = location.file or ""
    if location.line is not None:
        place = f"{place}:{location.line}" if place else f"line {location.line}"
    if place and location.key:
        return one_line(f"{place}: {location.key}")
    return one_line(place or location.key or "")
