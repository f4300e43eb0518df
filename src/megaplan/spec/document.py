"""YAML or JSON text to plain values and the place of every key.

The text is read as parser events, without a loader: nothing is constructed, every key keeps its line and column, duplicate keys are seen,
nesting is bounded, and an alias is the value itself instead of a copy. Scalars follow the YAML 1.2 core schema, minus every spelling that
another reader takes for another value: `NO`, `1:30`, `1_000`, `010` and `0x10` stay text, and `3e-4` is a number.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.wording import plural, quoted

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

    def with_override(self, key: str, argument: str) -> "SourceMap":
        """The map after `--set` has replaced a key and everything below it."""
        below = tuple(f"{key}{separator}" for separator in ".[")
        marks = {name: mark for name, mark in self.marks.items() if name != key and not name.startswith(below)}
        return SourceMap(self.file, marks, {**self.overrides, key: argument})


NOWHERE = SourceMap()


MAX_DEPTH = 24
MAX_VALUES = 20_000
MAX_FINDINGS = 60
_MAX_DIGITS = 4000  # Python does not convert longer text; it stays text and is refused as not an integer
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+([eE][-+]?[0-9]+)?|(0|[1-9][0-9]*)(\.[0-9]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+))")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Document(NamedTuple):
    """Plain values of a text, the positions of its keys, and errors that did not stop its reading."""

    value: Any
    source: SourceMap
    faults: tuple[Diagnostic, ...] = ()


def parse_document(text: str, file: str | None) -> Document:
    """Parse a YAML or JSON text that has one document.

    Args:
        text: Decoded text.
        file: Name in diagnostics; a text of a name ending in `.json` must follow JSON's grammar.

    Returns:
        The document; MP110, MP111, MP113, MP114 and MP118 are among its faults.

    Raises:
        MegaplanError: MP105, MP108, MP109, MP117 or MP119: the text cannot be read to its end.
    """
    if file is not None and file.endswith(".json"):
        _check_json(text, file)
    reader = _Reader(text, file)
    value = reader.document()
    return Document(value, SourceMap(file, reader.marks), tuple(first_findings(reader.found, reader.num_found, file)))


def first_findings(shown: list[Diagnostic], count: int, file: str | None) -> list[Diagnostic]:
    """The findings that are shown, and MP116 if there are more."""
    if count <= len(shown):
        return shown
    return [*shown, diagnostic("MP116", f"{plural(count - len(shown), 'more finding')} of the same document", Location(file))]


def resolve_scalar(text: str) -> Any:
    """The value of a plain scalar."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= _MAX_DIGITS else text
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Reader:
    """One pass over the parser's events."""

    def __init__(self, text: str, file: str | None) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
        self._file = file
        self._num_lines = len(text.splitlines())
        self._anchors: dict[str, Any] = {}
        self._num_values = 0
        self.marks: dict[str, Mark] = {}
        self.found: list[Diagnostic] = []
        self.num_found = 0

    def document(self) -> Any:
        """The value of the whole text."""
        try:
            next(self._events)  # the stream's start
            if isinstance(next(self._events), yaml.StreamEndEvent):
                raise self._stop("MP105", "only spaces and comments", None, "megaplan new nam56r-8xh200 > spec.yaml")
            value = self._value(next(self._events), (), 0)
            next(self._events)  # the document's end
            after = next(self._events)
            if isinstance(after, yaml.DocumentStartEvent):
                lines = after.start_mark.line if after.start_mark is not None else 0
                self._add("MP111", "another document begins here", after, hints=(f"head -n {lines} IN > OUT",))
            return value
        except yaml.MarkedYAMLError as error:
            raise MegaplanError([*self.found, self._syntax_error(error)]) from None
        except yaml.YAMLError as error:
            raise self._stop("MP108", str(error).splitlines()[0], None) from None

    def _value(self, event: Any, path: KeyPath, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise self._stop("MP119", f"more than {MAX_VALUES:,} values", event)
        if depth > MAX_DEPTH:
            raise self._stop("MP117", f"more than {MAX_DEPTH} lists or mappings inside each other", event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                self._add("MP114", f"*{event.anchor} is inside its own anchor's value, or no earlier value has this anchor", event)
            return self._anchors.get(str(event.anchor))
        if event.tag is not None:
            self._add("MP113", f"{dotted(path) or 'the document'} has the tag {quoted(event.tag)}", event, hints=("remove the tag",))
        if isinstance(event, yaml.MappingStartEvent):
            value: Any = self._mapping(path, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path, depth)
        else:
            value = event.value if event.style else resolve_scalar(event.value)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _mapping(self, path: KeyPath, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = event.value if isinstance(event, yaml.ScalarEvent) else ""
            if not key:
                self._add("MP118", f"{dotted(path) or 'the document'} has a key that is empty, an alias, a list or a mapping", event)
                if not isinstance(event, yaml.ScalarEvent):
                    self._value(event, path, depth + 1)
            here = (*path, key)
            name = dotted(here)
            if key in value:
                first, line = self.marks[name][0], event.start_mark.line + 1
                hint = f"remove the one on line {first} or on line {line}" if first != line else f"remove one {key}"
                self._add("MP110", f"{quoted(name)} is already on line {first}", event, key=name, hints=(hint,))
            else:
                self.marks[name] = (event.start_mark.line + 1, event.start_mark.column + 1)
            value[key] = self._value(next(self._events), here, depth + 1)
        return value

    def _sequence(self, path: KeyPath, depth: int) -> list[Any]:
        value: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            here = (*path, len(value))
            self.marks[dotted(here)] = (event.start_mark.line + 1, event.start_mark.column + 1)
            value.append(self._value(event, here, depth + 1))
        return value

    def _syntax_error(self, error: yaml.MarkedYAMLError) -> Diagnostic:
        mark = error.problem_mark or error.context_mark
        if mark is not None and mark.line >= self._num_lines and error.context_mark is not None:
            mark = error.context_mark  # a bracket that is not closed is reported at its beginning
        problem = error.problem or "the text is not complete"
        context = f" {error.context}" if error.context else ""
        if error.context and error.context_mark is not None and mark is not None and error.context_mark.line != mark.line:
            context += f" that begins on line {error.context_mark.line + 1}"
        hints = []
        if "tab" in problem:
            hints.append("indent with spaces")
        elif "mapping values are not allowed" in problem:
            hints.append("quote a value that has a colon, and put every key on its own line or inside {}")
        elif "cannot start any token" in problem:
            hints.append("quote a value that begins with @, `, % or a tab")
        where = Location(self._file)
        if mark is not None:
            where = Location(self._file, min(mark.line + 1, self._num_lines), mark.column + 1)
        return diagnostic("MP108", f"{problem}{context}", where, hints)

    def _add(self, code: str, detail: str, event: Any, key: str | None = None, hints: tuple[str, ...] = ()) -> None:
        self.num_found += 1
        if len(self.found) >= MAX_FINDINGS:
            return
        mark = event.start_mark
        self.found.append(diagnostic(code, detail, Location(self._file, mark.line + 1, mark.column + 1, key), hints))

    def _stop(self, code: str, detail: str, event: Any, *hints: str) -> MegaplanError:
        where = Location(self._file, event.start_mark.line + 1, event.start_mark.column + 1) if event is not None else Location(self._file)
        return MegaplanError([*self.found, diagnostic(code, detail, where, hints)])


def _check_json(text: str, file: str) -> None:
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = Location(file, error.lineno, error.colno)
        raise MegaplanError([diagnostic("MP109", error.msg[:1].lower() + error.msg[1:], where)]) from None
    except RecursionError:
        raise MegaplanError([diagnostic("MP117", f"more than {MAX_DEPTH} lists or mappings inside each other", Location(file))]) from None
    except ValueError as error:
        raise MegaplanError([diagnostic("MP109", str(error), Location(file))]) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
