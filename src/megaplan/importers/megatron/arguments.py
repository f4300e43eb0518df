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
"""Of a number that a launch gives."""
_INTEGER, _NUMBER = re.compile(r"[-+]?\d+"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Given:
    """What a text says of a launch.

    Attributes:
        values: By the arguments' names, underscores for dashes.
        lines: Line of each.
        environment: Variables that the launch sets.
        left_out: What of the text was not followed, each with its line.
        parsed: The values are those after Megatron's parser, defaults among them: names that are not known here say nothing.
    """

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[int, str], ...] = ()
    parsed: bool = False


class Arguments:
    """The arguments of a launch while they are read; every one is read, listed as irrelevant, told as not carried, or refused.

    Args:
        given: What the launch says.
        name: What diagnostics call the file.
        vocab_size: The padded vocabulary, where it is known outside the launch.
    """

    def __init__(self, given: Given, name: str, vocab_size: int | None = None) -> None:
        self.values = dict(given.values)
        self.environment = given.environment
        self.vocab_size = vocab_size
        self._given, self._name = given, name
        self._read: set[str] = set()
        self._errors: list[Diagnostic] = []
        self._faulty: set[str] = set()  # arguments whose value was refused: what follows from the dummy in its place is not told
        self._told: dict[str, str] = {}
        self._notes: list[Diagnostic] = []

    def at(self, key: str) -> Location:
        """Location of an argument."""
        return Location(self._name, self._given.lines.get(key), key=flag(key))

    def value(self, key: str) -> Any:
        """The argument as it stands, or Megatron's default."""
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
        """A positive integer, or one from 0 on where the table says so, up to `most`; required where there is no default."""
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
        """True if a switch is on."""
        found = self.value(key)
        if not isinstance(found, bool):
            self.wrong(key, found, "a switch, without a value")
        return found is True

    def word(self, key: str) -> str | None:
        """One of the words that are accepted; None where the argument is absent and Megatron has no default."""
        found, row = self.value(key), ARGUMENTS[key]
        if found is None and row.default is None:
            return None
        if found not in row.words:
            self.cannot(key, f"it is read as one of {', '.join(row.words)}", row.default)
            return None if row.default is None else str(row.default)
        return str(found)

    def text(self, key: str) -> Any:
        """A word or number that is taken as it is; no list or mapping."""
        found = self.value(key)
        if isinstance(found, list | dict):
            self.wrong(key, found, "one word")
            return ARGUMENTS[key].default
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
            read = {Kind.SWITCH: self.given, Kind.NUMBER: self.number, Kind.WORD: self.word, Kind.TEXT: self.text}[row.kind]
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
        self._refuse(key, diagnostic("MP916", f"{flag(key)} {_shown(found)}, and it is {wanted}", self.at(key)))

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

    def note(self, key: str, said: str) -> None:
        """Something that was taken, since the launch does not say it."""
        self._notes.append(diagnostic("MP919", said, self.at(key), severity=Severity.NOTE))

    def unknown_vocabulary(self, tokenizer: str) -> None:
        """The tokenizer decides the vocabulary, and its size is not known here."""
        detail = f"--vocab-size is missing, and the tokens of {tokenizer} are not known here"
        self._errors.append(diagnostic("MP916", detail, self.at("vocab_size"), ("--set model.vocab_size=…",)))

    def finish(self) -> None:
        """Judge the arguments that nobody read, then stop if anything is wrong.

        Raises:
            MegaplanError: Everything found.
        """
        whole = not self._errors  # reading that stopped early leaves arguments that another launch would have read
        for key in self.values:
            if key in self._read or key in IGNORED or key.startswith(IGNORED_PREFIXES):
                continue
            if key in ARGUMENTS and ARGUMENTS[key].conversion is REPORTED:
                if self.values[key] not in (None, False):
                    self.tell(key, ARGUMENTS[key].note)
            elif not self._given.parsed and self.values[key] not in (None, False) and (whole or key not in ARGUMENTS):
                self._errors.append(self._unread(key))
        if self._errors:
            raise MegaplanError(self._errors)

    def _unread(self, key: str) -> Diagnostic:
        """MP913 of an argument that is not known; MP914 of one that only other arguments give a meaning."""
        said = f"{flag(key)} {_shown(self.values[key])}".replace(" True", "")
        hint = f"remove {flag(key)} from a copy of the file if it changes no tensor"
        if key in ARGUMENTS:
            return diagnostic("MP914", f"{said}: with the other arguments of this launch it has no counterpart", self.at(key), (hint,))
        return diagnostic("MP913", said, self.at(key), (hint,))

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """One warning that lists what the launch says and a spec does not carry, and notes of what was taken or left out."""
        left_out = [
            diagnostic("MP919", why, Location(self._name, line or None), severity=Severity.NOTE) for line, why in self._given.left_out
        ]
        told = self._told and [
            diagnostic("MP915", "\n".join(self._told.values()), self.at(next(iter(self._told))), severity=Severity.WARNING)
        ]
        return (*(told or ()), *self._notes, *left_out)


def name_of(key: str) -> str:
    """`tensor_model_parallel_size` of `--tensor-model-parallel-size`."""
    return str(key).lstrip("-").replace("-", "_")


def typed(value: Any) -> Any:
    """A text as the number or truth value that it is."""
    if not isinstance(value, str):
        return value
    if len(value) > MOST_DIGITS:  # no number of a launch; what asks for one refuses the text
        return value
    if _INTEGER.fullmatch(value):
        return int(value)
    if _NUMBER.fullmatch(value):
        return float(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _unresolved(value: Any) -> list[str]:
    """Names of variables that a value misses."""
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
