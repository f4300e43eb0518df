"""Megatron's launch arguments from a text: a shell's words, or YAML with the names of the arguments as keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.hosts.megatron.argument import REPORTED, REQUIRED, Argument, Kind, flag
from megaplan.hosts.megatron.not_carried import IGNORED, IGNORED_PREFIXES
from megaplan.hosts.megatron.vocabulary import ARGUMENTS, section_rows
from megaplan.scalars import MAX_INT
from megaplan.spec.document import parse_document

_YAML_KEY = re.compile(r"^\s*(?:-{0,2})[A-Za-z_][\w-]*:(\s|$)")
_INTEGER, _NUMBER = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_SECTIONS = ("MODEL_ARGS", "ENV_VARS")


class Arguments:
    """The arguments of a launch while they are read; every one is read, listed as irrelevant, told as not carried, or refused.

    Args:
        values: By name, underscores for dashes.
        lines: Where each stands.
        name: What diagnostics call the file.
        environment: Variables that the file sets.
    """

    def __init__(self, values: dict[str, Any], lines: dict[str, int], name: str, environment: dict[str, Any] | None = None) -> None:
        self.values = values
        self.environment = environment or {}
        self._lines, self._name = lines, name
        self._read: set[str] = set()
        self._errors: list[Diagnostic] = []
        self._told: dict[str, str] = {}

    def at(self, key: str) -> Location:
        """Where an argument stands."""
        return Location(self._name, self._lines.get(key), key=flag(key))

    def value(self, key: str) -> Any:
        """The argument as it stands, or Megatron's default."""
        self._read.add(key)
        found = self.values.get(key)
        default = ARGUMENTS[key].default
        return found if found is not None else None if default == REQUIRED else default

    def whole(self, key: str) -> int:
        """A positive integer, or one from 0 on where the table says so; required where there is no default."""
        found = self.value(key)
        if found is None:
            self._errors.append(diagnostic("MP916", f"{flag(key)} is missing", self.at(key), (f"{flag(key)} 1",)))
            return 1
        kind = ARGUMENTS[key].kind
        if isinstance(found, bool) or not isinstance(found, int) or not (kind is not Kind.WHOLE) <= found <= MAX_INT:
            self.wrong(key, found, "an integer from 0 on" if kind is Kind.WHOLE else "a positive integer")
            return 1
        return found

    def optional(self, key: str) -> int | None:
        """A positive integer, or None where the argument is absent."""
        return None if self.value(key) is None else self.whole(key)

    def number(self, key: str) -> float | None:
        """A number that is not negative; None where the argument is absent and Megatron has no default."""
        found = self.value(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            self.wrong(key, found, "a number from 0 on")
            return ARGUMENTS[key].default or 0.0
        return float(found)

    def given(self, key: str) -> bool:
        """Whether a switch is on."""
        found = self.value(key)
        if not isinstance(found, bool):
            self.wrong(key, found, "a switch, without a value")
        return found is True

    def word(self, key: str) -> str:
        """One of the words that are accepted."""
        found, row = str(self.value(key)), ARGUMENTS[key]
        if found not in row.words:
            self.cannot(key, f"it is read as one of {', '.join(row.words)}", row.default)
            return str(row.default)
        return found

    def pass_over(self, *keys: str) -> None:
        """Arguments of a feature that is refused as a whole."""
        self._read.update(keys)

    def accept(self, key: str) -> None:
        """An argument of which one value has a counterpart in a spec."""
        row, found = ARGUMENTS[key], self.value(key)
        if found != row.means and (found or row.means):
            self.cannot(key, row.note, "" if row.means is True else row.means or None)

    def converted(self, row: Argument) -> Any:
        """The value of the spec's key that the argument decides."""
        if row.kind in (Kind.COUNT, Kind.WHOLE):
            found: Any = self.optional(row.name) if row.default is None else self.whole(row.name)
        else:
            read = {Kind.SWITCH: self.given, Kind.NUMBER: self.number, Kind.WORD: self.word, Kind.TEXT: self.value}[row.kind]
            found = read(row.name)
        return row.conversion.read(found)

    def section(self, section: str, block: str = "") -> dict[str, Any]:
        """The keys of a section of the spec that one argument each decides.

        Args:
            section: As `model.attention`.
            block: The kind of block, where the section is one of several kinds; arguments of the others are not read.
        """
        return {row.key.rpartition(".")[2]: self.converted(row) for row in section_rows(section) if not block or row.block in ("", block)}

    def wrong(self, key: str, found: Any, wanted: str) -> None:
        """The argument's value is of another type."""
        self._errors.append(diagnostic("MP916", f"{flag(key)} {_shown(found)}, and it is {wanted}", self.at(key)))

    def cannot(self, key: str, why: str, instead: Any = None) -> None:
        """The argument's value has no counterpart in a spec."""
        hint = () if instead is None else (f"{flag(key)} {instead}".rstrip(),)
        self._errors.append(
            diagnostic("MP914", f"{flag(key)} {_shown(self.values.get(key))}: {why}".replace("  ", " "), self.at(key), hint)
        )

    def fail(self, found: Sequence[Diagnostic]) -> None:
        """Faults of a text that an argument holds."""
        self._errors += found

    def tell(self, key: str, why: str) -> None:
        """A spec does not carry the argument, and no tensor depends on it."""
        self._told[key] = f"{flag(key)} {_shown(self.values.get(key))}: {why}".replace(" True:", ":")

    def finish(self) -> None:
        """Judge the arguments that nobody read, then stop if anything is wrong.

        Raises:
            MegaplanError: Everything found.
        """
        for key in self.values:
            if key in self._read or key in IGNORED or key.startswith(IGNORED_PREFIXES):
                continue
            if key in ARGUMENTS and ARGUMENTS[key].conversion is REPORTED:
                self.tell(key, ARGUMENTS[key].note)
            else:
                hint = f"remove {flag(key)} from a copy of the file if it changes no tensor"
                self._errors.append(
                    diagnostic("MP913", f"{flag(key)} {_shown(self.values[key])}".replace(" True", ""), self.at(key), (hint,))
                )
        if self._errors:
            raise MegaplanError(self._errors)

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """One warning that lists what the launch says and a spec does not carry."""
        if not self._told:
            return ()
        return (diagnostic("MP915", "\n".join(self._told.values()), self.at(next(iter(self._told))), severity=Severity.WARNING),)


def read_arguments(text: str, name: str) -> Arguments:
    """The arguments of a launch.

    Args:
        text: Words of a shell with a torchrun line or without, or YAML; a mapping `MODEL_ARGS` of a test's configuration is one too.
        name: What diagnostics call the file.

    Raises:
        MegaplanError: The text is neither.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if lines and _YAML_KEY.match(lines[0]):
        return _yaml(text, name)
    return _words(text, name)


def _yaml(text: str, name: str) -> Arguments:
    document = parse_document(text, name)
    if document.faults or not isinstance(document.value, dict):
        faults = document.faults or (diagnostic("MP916", f"{name} is no mapping of arguments", Location(name)),)
        raise MegaplanError(faults)
    whole = document.value
    nested = isinstance(whole.get("MODEL_ARGS"), dict)
    values = whole["MODEL_ARGS"] if nested else {key: value for key, value in whole.items() if key not in _SECTIONS}
    environment = whole.get("ENV_VARS") if isinstance(whole.get("ENV_VARS"), dict) else {}
    prefix = "MODEL_ARGS." if nested else ""
    located = {key: document.source.locate(f"{prefix}{key}") for key in values}
    return Arguments(
        {_name(key): _typed(value) for key, value in values.items()},
        {_name(key): place.line for key, place in located.items() if place.line is not None},
        name,
        environment,
    )


def _words(text: str, name: str) -> Arguments:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    environment: dict[str, Any] = {}
    key: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError as error:
            raise MegaplanError([diagnostic("MP916", f"{name}: {str(error).lower()}", Location(name, number))]) from None
        for word in words:
            if word.startswith("--"):
                written, _, value = word.partition("=")
                key = _name(written)
                values[key] = _typed(value) if value else True
                lines[key] = number
            elif key is None or word.endswith(".py"):
                variable, equals, value = word.partition("=")
                if equals and variable.isidentifier():
                    environment[variable] = value
                key = None
            else:
                held = values[key]
                values[key] = _typed(word) if held is True else [*(held if isinstance(held, list) else [held]), _typed(word)]
    if not values:
        raise MegaplanError([diagnostic("MP916", f"{name} has no argument that begins with --", Location(name), ("--num-layers 32 …",))])
    return Arguments(values, lines, name, environment)


def _name(key: str) -> str:
    return str(key).lstrip("-").replace("-", "_")


def _typed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if _INTEGER.fullmatch(value):
        return int(value)
    if _NUMBER.fullmatch(value):
        return float(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _shown(value: Any) -> str:
    if value is None:
        return "is not given"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def moved(found: Diagnostic, at: Location) -> Diagnostic:
    """A diagnostic at another place."""
    return replace(found, location=at)
