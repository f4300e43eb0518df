"""Positions of the keys of a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megaplan.errors import Location

KeyPath = tuple[str | int, ...]
Mark = tuple[int, int]


def dotted(path: KeyPath) -> str:
    """A path in the users' notation: `split.spans[0][1]`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


@dataclass(frozen=True, slots=True)
class SourceMap:
    """Positions by dotted key, 1-based; values of `--set` are at their argument."""

    file: str | None = None
    marks: Mapping[str, Mark] = field(default_factory=lambda: MappingProxyType({}))
    overrides: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def locate(self, key: str) -> Location:
        """The position of a key, or of the nearest section around a key that is not written."""
        written = key
        if key not in self.marks and (below := [name for name in self.overrides if name.startswith(f"{key}.")]):
            return Location(file=self.overrides[below[0]], key=below[0])
        while written:
            if written in self.overrides:
                return Location(file=self.overrides[written], key=key)
            if written in self.marks:
                line, column = self.marks[written]
                return Location(self.file, line, column, key)
            written = written[: max(written.rfind("."), written.rfind("["), 0)]
        return Location(file=self.file, key=key or None)

    def with_override(self, key: str, argument: str) -> SourceMap:
        """The map after `--set` has replaced a key and everything below it."""
        below = tuple(f"{key}{separator}" for separator in ".[")
        marks = {name: mark for name, mark in self.marks.items() if name != key and not name.startswith(below)}
        return SourceMap(self.file, marks, {**self.overrides, key: argument})


NOWHERE = SourceMap()
