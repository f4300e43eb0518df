"""`Arguments`: the arguments of a launch while they are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.hosts.megatron.argument import REPORTED, REQUIRED, Argument, Kind, flag
from megaplan.hosts.megatron.not_carried import IGNORED, IGNORED_PREFIXES
from megaplan.hosts.megatron.vocabulary import ARGUMENTS, section_rows
from megaplan.importers.megatron.unset import readable, unset_names
from megaplan.scalars import MAX_INT

MOST_DIGITS = 40
"""Most digits of a number that a launch gives."""
_INTEGER, _NUMBER = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments that a text gives.

    Attributes:
        values: Values by the arguments' names, with underscores for dashes.
        lines: Line of each argument.
        environment: Variables that the launch sets.
        left_out: Parts of the text that were not followed, each with its line.
        parsed: True for values after Megatron's parser, which include defaults, so unknown names are ignored.
    """

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[int, str], ...] = ()
    parsed: bool = False


class Arguments:
    """The arguments of a launch while they are read; each one is read, listed as irrelevant, reported as not carried, or refused.

    Args:
        given: Arguments of the launch.
        name: Name of the file in diagnostics.
        vocab_size: The padded vocabulary, if it is known from elsewhere.
    """

    def __init__(self, given: Given, name: str, vocab_size: int | None = None) -> None:
        self.values = dict(given.values)
        self.environment = given.environment
        self.vocab_size = vocab_size
        self._given, self._name = given, name
        self._read: set[str] = set()
        self._errors: list[Diagnostic] = []
        self._faulty: set[str] = set()  # arguments whose value was refused: consequences of the dummy in its place are not reported
        self._reported: dict[str, str] = {}
        self._notes: list[Diagnostic] = []

    def at(self, key: str) -> Location:
        """Location of an argument."""
        return Location(self._name, self._given.lines.get(key), key=flag(key))

    def value(self, key: str) -> Any:
        """The argument's raw value, or Megatron's default."""
        found = self.values.get(key)
        if key not in self._read and (names := _unresolved(found)):
            self._unset(key, names)
            self.values[key] = found = None
        self._read.add(key)
        default = ARGUMENTS[key].default
        return found if found is not None else None if default == REQUIRED else default

    def _unset(self, key: str, names: list[str]) -> None:
        said = f"{flag(key)} {_shown(self.values[key])}, and {', '.join(names)} {'is' if len(names) == 1 else 'are'} set nowhere"
        self._refuse(key, diagnostic("MP918", said, self.at(key), [f"--env {name}=…" for name in names]))

    def _refuse(self, key: str, found: Diagnostic) -> None:
        if key not in self._faulty:
            self._errors.append(found)
        self._faulty.add(key)

    def whole(self, key: str, most: int = MAX_INT) -> int:
        """A positive integer, or one from 0 on if the table says so, up to `most`; required without a default."""
        found = self.value(key)
        if found is None:
            self._refuse(key, diagnostic("MP916", f"{flag(key)} is missing", self.at(key), (f"{flag(key)} 1",)))
            return 1
        kind = ARGUMENTS[key].kind
        if isinstance(found, bool) or not isinstance(found, int) or not (kind is not Kind.WHOLE) <= found <= most:
            wanted = "an integer from 0 on" if kind is Kind.WHOLE else "a positive integer"
            self.wrong(key, found, wanted if most == MAX_INT else f"{wanted}, at most {most:,}")
            return 1
        return found

    def optional(self, key: str) -> int | None:
        """A positive integer, or None if the argument is absent."""
        return None if self.value(key) is None else self.whole(key)

    def number(self, key: str) -> float | None:
        """A number that is not negative; None if the argument is absent and Megatron has no default."""
        found = self.value(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            self.wrong(key, found, "a number from 0 on")
            return ARGUMENTS[key].default or 0.0
        return float(found)

    def given(self, key: str) -> bool:
        """True if a switch is on."""
        found = self.value(key)
        if not isinstance(found, bool):
            self.wrong(key, found, "a switch, without a value")
        return found is True

    def word(self, key: str) -> str | None:
        """One of the accepted words; None if the argument is absent and Megatron has no default."""
        found, row = self.value(key), ARGUMENTS[key]
        if found is None and row.default is None:
            return None
        if found not in row.words:
            self.cannot(key, f"it is read as one of {', '.join(row.words)}", row.default)
            return None if row.default is None else str(row.default)
        return str(found)

    def text(self, key: str) -> Any:
        """A word or number without conversion; no list or mapping."""
        found = self.value(key)
        if isinstance(found, list | dict):
            self.wrong(key, found, "one word")
            return ARGUMENTS[key].default
        return found

    def pass_over(self, *keys: str) -> None:
        """Ignores the arguments of a feature that is refused as a whole."""
        self._read.update(keys)

    def accept(self, key: str) -> None:
        """Accepts an argument at the one value that has a counterpart in a spec."""
        row, found = ARGUMENTS[key], self.value(key)
        if found != row.means and (found or row.means):
            self.cannot(key, row.note, "" if row.means is True else row.means or None)

    def converted(self, row: Argument) -> Any:
        """The value of the spec's key that the argument decides."""
        if row.kind in (Kind.COUNT, Kind.WHOLE):
            found: Any = self.optional(row.name) if row.default is None else self.whole(row.name)
        else:
            read = {Kind.SWITCH: self.given, Kind.NUMBER: self.number, Kind.WORD: self.word, Kind.TEXT: self.text}[row.kind]
            found = read(row.name)
        return row.conversion.read(found)

    def section(self, section: str, block: str = "") -> dict[str, Any]:
        """Keys of a section of the spec that follow from one argument each.

        Args:
            section: Dotted name, such as `model.attention`.
            block: Kind of block, if the section is one of several kinds; arguments of other kinds are not read.
        """
        return {row.key.rpartition(".")[2]: self.converted(row) for row in section_rows(section) if not block or row.block in ("", block)}

    def wrong(self, key: str, found: Any, wanted: str) -> None:
        """Reports a value of another type."""
        self._refuse(key, diagnostic("MP916", f"{flag(key)} {_shown(found)}, and it is {wanted}", self.at(key)))

    def cannot(self, key: str, why: str, instead: Any = None) -> None:
        """Reports a value that has no counterpart in a spec."""
        hint = () if instead is None else (f"{flag(key)} {instead}".rstrip(),)
        self._errors.append(
            diagnostic("MP914", f"{flag(key)} {_shown(self.values.get(key))}: {why}".replace("  ", " "), self.at(key), hint)
        )

    def fail(self, found: Sequence[Diagnostic]) -> None:
        """Reports faults of a text that an argument holds."""
        self._errors += found

    def warn(self, key: str, why: str) -> None:
        """Reports an argument that a spec does not carry and no tensor depends on."""
        self._reported[key] = f"{flag(key)} {_shown(self.values.get(key))}: {why}".replace(" True:", ":")

    def note(self, key: str, said: str) -> None:
        """Reports an assumption where the launch says nothing."""
        self._notes.append(diagnostic("MP919", said, self.at(key), severity=Severity.NOTE))

    def say(self, said: str) -> None:
        """Reports what was read outside the arguments."""
        self._notes.append(diagnostic("MP919", said, Location(self._name), severity=Severity.NOTE))

    def unknown_vocabulary(self, tokenizer: str) -> None:
        """Reports that the tokenizer decides the vocabulary and its size is unknown."""
        detail = f"--vocab-size is missing, and the tokens of {tokenizer} are not known here"
        self._errors.append(diagnostic("MP916", detail, self.at("vocab_size"), ("--set model.vocab_size=…",)))

    def finish(self) -> None:
        """Judges the arguments that no import read, then stops if anything is wrong.

        Raises:
            MegaplanError: Everything found.
        """
        whole = not self._errors  # reading that stopped early leaves arguments that another launch would have read
        for key in self.values:
            if key in self._read or key in IGNORED or key.startswith(IGNORED_PREFIXES):
                continue
            if key in ARGUMENTS and ARGUMENTS[key].conversion is REPORTED:
                if self.values[key] not in (None, False):
                    self.warn(key, ARGUMENTS[key].note)
            elif not self._given.parsed and self.values[key] not in (None, False) and (whole or key not in ARGUMENTS):
                self._errors.append(self._unread(key))
        if self._errors:
            raise MegaplanError(self._errors)

    def _unread(self, key: str) -> Diagnostic:
        """MP913 for an unknown argument; MP914 for one that has a meaning only with other arguments."""
        said = f"{flag(key)} {_shown(self.values[key])}".replace(" True", "")
        hint = f"remove {flag(key)} from a copy of the file if it changes no tensor"
        if key in ARGUMENTS:
            return diagnostic("MP914", f"{said}: with the other arguments of this launch it has no counterpart", self.at(key), (hint,))
        return diagnostic("MP913", said, self.at(key), (hint,))

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """One warning that lists what a spec does not carry, and notes about assumptions and omissions."""
        left_out = [
            diagnostic("MP919", why, Location(self._name, line or None), severity=Severity.NOTE) for line, why in self._given.left_out
        ]
        found = self._reported and [
            diagnostic("MP915", "\n".join(self._reported.values()), self.at(next(iter(self._reported))), severity=Severity.WARNING)
        ]
        return (*(found or ()), *self._notes, *left_out)


def name_of(key: str) -> str:
    """`tensor_model_parallel_size` for `--tensor-model-parallel-size`."""
    return str(key).lstrip("-").replace("-", "_")


def typed(value: Any) -> Any:
    """A text as the number or truth value that it spells."""
    if not isinstance(value, str):
        return value
    if len(value) > MOST_DIGITS:  # too long for a launch's number; a reader of numbers refuses the text
        return value
    if _INTEGER.fullmatch(value):
        return int(value)
    if _NUMBER.fullmatch(value):
        return float(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _unresolved(value: Any) -> list[str]:
    """Names of variables that a value lacks."""
    texts = value if isinstance(value, list) else [value]
    return [name for text in texts if isinstance(text, str) for name in unset_names(text)]


def _shown(value: Any) -> str:
    if value is None:
        return "is not given"
    text = readable(" ".join(map(str, value)) if isinstance(value, list) else str(value))
    return text if len(text) <= 80 else f"{text[:80]}…"


def moved(found: Diagnostic, at: Location) -> Diagnostic:
    """A diagnostic at another place."""
    return replace(found, location=at)
