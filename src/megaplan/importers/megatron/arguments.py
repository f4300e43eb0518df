"""`Arguments`: the arguments of a launch while they are read."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.hosts.megatron.argument import REPORTED, REQUIRED, Argument, Kind, flag
from megaplan.hosts.megatron.not_carried import IGNORED, IGNORED_PREFIXES
from megaplan.hosts.megatron.vocabulary import ARGUMENTS, section_rows
from megaplan.importers.megatron.meant import MEANT, OLDER, OLDER_IGNORED, OLDER_WORDS, decides_a_tensor, letters, renamed, translate_forks
from megaplan.importers.megatron.model_commands import command
from megaplan.importers.megatron.unset import readable, remedies, together, unset_names
from megaplan.importers.structure import Policy, names_a_tensor, unknown_names
from megaplan.scalars import MAX_INT

MOST_DIGITS = 40
"""Most digits of a number that a launch gives."""
_SHAPES = ("hidden_size", "num_attention_heads", "seq_length")
_MODEL_OF_OTHERS = ("yaml_cfg", "model", "model_name_or_path", "mcore_model", "hf_checkpoint", "pretrained_checkpoint", "load")
"""Arguments by which other front ends of Megatron name the model, whose configuration then has its shapes."""
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
        program: The program that the launch starts; empty if the text names none.
        forked: True for values after the parser of a fork, whose names that decide a tensor are not ignored.
    """

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[int, str], ...] = ()
    parsed: bool = False
    program: str = ""
    forked: bool = False


class Arguments:
    """The arguments of a launch while they are read; each one is read, listed as irrelevant, reported as not carried, or refused.

    Args:
        given: Arguments of the launch.
        name: Name of the file in diagnostics.
        vocab_size: The padded vocabulary, if it is known from elsewhere.
        policy: Policy for arguments that the importer does not know.
    """

    def __init__(self, given: Given, name: str, vocab_size: int | None = None, policy: Policy | None = None) -> None:
        self._policy = policy or Policy()
        self.values = {key: value for key, value in given.values.items() if key not in self._policy.ignored}
        self.environment = given.environment
        self.vocab_size = vocab_size
        self._given, self.name = given, name
        self._read: set[str] = set()
        self._errors: list[Diagnostic] = []
        self._faulty: set[str] = set()  # arguments with a refused value, replaced by a dummy whose consequences are not reported
        self._reported: dict[str, str] = {}
        self._notes: list[Diagnostic] = []
        self._missing: list[str] = []
        self._translate_older()

    def _translate_older(self) -> None:
        """Replaces switches of earlier releases by the arguments that took their place."""
        for key, said, uncertain in (*renamed(self.values, self._read, ARGUMENTS), *translate_forks(self.values)):
            (self.guess if uncertain else self.note)(key, said)
        if self.values.get("checkpoint_activations") and self.values.get("recompute_method") is None:
            self.values["recompute_method"] = "uniform"  # the only method in releases that have this switch
        for older, (name, value) in OLDER.items():
            if self.values.get(older) and self.values.get(name) is None:
                self.values[name] = value
                self.note(name, f"{flag(older)} is of earlier releases, and is read as {flag(name)} {value}")

    @property
    def parsed(self) -> bool:
        """True for values after Megatron's parser, as in a log or a resolved configuration."""
        return self._given.parsed

    @property
    def program(self) -> str:
        """The program that the launch starts; empty if the text names none."""
        return self._given.program

    def at(self, key: str) -> Location:
        """Location of an argument."""
        return Location(self.name, self._given.lines.get(key), key=flag(key))

    def value(self, key: str) -> Any:
        """The argument's raw value, or Megatron's default."""
        found = self.values.get(key)
        if key not in self._read and (names := _unresolved(found)):
            lacks = f"{flag(key)} {_shown(found)}, and {', '.join(names)} {'is' if len(names) == 1 else 'are'} set nowhere"
            if ARGUMENTS[key].key.startswith("training."):
                self.guess(key, f"{lacks}: it is read as absent", *(f"--env {name}=…" for name in names if name.isidentifier()))
            else:
                self._unset(key, names, lacks)
            self.values[key] = found = None
        self._read.add(key)
        default = ARGUMENTS[key].default
        return found if found is not None else None if default == REQUIRED else default

    def _unset(self, key: str, names: list[str], said: str) -> None:
        """Reports a value that lacks variables, arguments of the script, or outputs of programs."""
        run = shlex.join(["megaplan", "import", "megatron", "--record", "--", "bash", self.name])
        programs = [name.strip("()") for name in names if name.startswith("(")]
        if programs:
            said = f"{flag(key)} {_shown(self.values[key])}, and only a run of the script gives the output of {', '.join(programs)}"
            return self._refuse(
                key, diagnostic("MP922", said, self.at(key), [f"megaplan import megatron {self.name} -- {flag(key)} …", run])
            )
        return self._refuse(key, diagnostic("MP918", said, self.at(key), remedies(names, self.name)))

    def _refuse(self, key: str, found: Diagnostic) -> None:
        if key not in self._faulty:
            self._errors.append(found)
        self._faulty.add(key)

    def whole(self, key: str, most: int = MAX_INT) -> int:
        """A positive integer, or one from 0 on if the table says so, up to `most`; required without a default."""
        found = self.value(key)
        if found is None:
            self._missing += [] if key in self._missing or key in self._faulty else [key]
            self._faulty.add(key)
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
        """True if a switch is on; YAML may say so with 1."""
        found = self.value(key)
        found = bool(found) if found in (0, 1) else found
        if not isinstance(found, bool):
            self.wrong(key, found, "a switch, without a value")
        return found is True

    def word(self, key: str) -> str | None:
        """One of the accepted words; None if the argument is absent and Megatron has no default."""
        found, row = self.text(key), ARGUMENTS[key]
        if found is None and row.default is None:
            return None
        if (key, found) in OLDER_WORDS:
            meant = OLDER_WORDS[key, found]
            self.note(key, f"{flag(key)} {found} has the tensors of {meant}, and is read as that")
            return meant
        if found not in row.words:
            plain = letters(found)
            near = next((word for word in row.words if letters(word) == plain), None)
            if near is not None:
                self.note(key, f"{flag(key)} {found} is read as {near}")
                return near
            if inner := next((word for word in row.words if len(word) >= 8 and word in str(found)), None):
                self.guess(key, f"{flag(key)} {found} is a fork's, and is planned as {inner}")
                return inner
            self.cannot(key, f"it is read as one of {', '.join(row.words)}", next(iter(row.words)))
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
            self.cannot(key, row.note, "" if row.means is True else row.means or None, f"--ignore {key.replace('_', '-')}")

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
        shown = "has no value" if found is True and ARGUMENTS[key].kind is not Kind.SWITCH else _shown(found)
        self._refuse(key, diagnostic("MP916", f"{flag(key)} {shown}, but it must be {wanted}", self.at(key)))

    def cannot(self, key: str, why: str, instead: Any = None, *otherwise: str) -> None:
        """Reports a value that has no counterpart in a spec; `otherwise` are the hints where there is no value instead."""
        hint = otherwise if instead is None else (f"{flag(key)} {instead}".rstrip(),)
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
        """Reports an assumption about a setting that the launch does not state."""
        self._notes.append(diagnostic("MP919", said, self.at(key), severity=Severity.NOTE))

    def guess(self, key: str, said: str, *hints: str) -> None:
        """Warns of an assumption or an uncounted part that affects memory; an empty key means the whole launch."""
        self._notes.append(diagnostic("MP919", said, self.at(key) if key else Location(self.name), hints, Severity.WARNING))

    def overruled(self, key: str, by: str) -> None:
        """Notes that a given argument has no effect, and what decides in its place."""
        row, found = ARGUMENTS[key], self.values.get(key)
        if found not in (None, False, row.default) and not (row.kind is Kind.WORD and found == row.default):
            self.note(key, f"{flag(key)} {_shown(found)}".replace(" True", "") + f" has no effect: {by}")

    def foreign(self) -> bool:
        """True if every argument that Megatron requires is missing: the launch is of another front end."""
        needed = [key for key, row in ARGUMENTS.items() if row.default == REQUIRED and key in _SHAPES]
        layers = ("num_layers", "hybrid_layer_pattern", "hybrid_override_pattern")
        if any(self.values.get(key) is not None for key in (*needed, *layers)):
            return False
        model = next((key for key in _MODEL_OF_OTHERS if isinstance(self.values.get(key), str)), None)
        whose = "" if model is None else f": its model comes from {flag(model)} {_shown(self.values[model])}"
        program = f" of {self.program.rpartition('/')[2]}" if self.program else ""
        said = (
            f"no {', '.join(map(flag, ('num_layers', *needed)))}: the launch{program} uses another front end than Megatron-LM's own{whose}"
        )
        hint = command("\n".join(f"{key}={value}" for key, value in self.values.items())) if model else "megaplan import hf CONFIG.json"
        hint = f"megaplan import torchtitan {self.name}" if "torchtitan" in self.program else hint
        self._errors.append(diagnostic("MP916", said, Location(self.name), (hint,)))
        return True

    def say(self, said: str) -> None:
        """Reports what was read outside the arguments."""
        self._notes.append(diagnostic("MP919", said, Location(self.name), severity=Severity.NOTE))

    def unknown_vocabulary(self, tokenizer: str) -> None:
        """Reports that the tokenizer decides the vocabulary and its size is unknown."""
        detail = f"--vocab-size is missing, and the tokens of {tokenizer} are not known here"
        self._errors.append(diagnostic("MP916", detail, self.at("vocab_size"), ("--set model.vocab_size=…",)))

    def finish(self) -> None:
        """Judges the arguments that no import read, then stops if anything is wrong.

        Raises:
            MegaplanError: Everything found.
        """
        if self._missing:
            self._errors.insert(0, self._lacking())
        whole = not self._errors  # if reading stopped early, some arguments remain that would otherwise have been read
        unknown: list[str] = []
        for key in (key for key in self.values if not self._is_settled(key)):
            value = self.values[key]
            if key in ARGUMENTS and ARGUMENTS[key].conversion is REPORTED:
                self.warn(key, ARGUMENTS[key].note)
            elif self._given.parsed and not (self._given.forked and key not in ARGUMENTS and names_a_tensor(key, value)):
                continue
            elif key not in ARGUMENTS and not self._policy.strict and not decides_a_tensor(key, value):
                unknown.append(key)
            elif whole or key not in ARGUMENTS:
                self._errors.append(self._unread(key))
        self._notes += unknown_names(unknown, self.values, self._said_of, self.at)
        self.stop()

    def stop(self) -> None:
        """Stops if anything found so far is wrong.

        Raises:
            MegaplanError: Everything found.
        """
        if self._errors:
            raise MegaplanError([*together(self._errors), *(self._omissions if self._missing else ())])

    def _said_of(self, key: str) -> str:
        return f"{flag(key)} {_shown(self.values[key])}".replace(" True", "")

    def _is_settled(self, key: str) -> bool:
        """True for an argument that was read, that is off, or that changes nothing."""
        return key in self._read or key in OLDER or changes_nothing(key) or self.values[key] in (None, False)

    def _unread(self, key: str) -> Diagnostic:
        """MP913 for an unknown argument; MP914 for one that has a meaning only with other arguments."""
        value = self.values[key]
        said = self._said_of(key)
        hints = [f"--ignore {key.replace('_', '-')}"]
        if key in ARGUMENTS:
            return diagnostic("MP914", f"{said}: a spec cannot express it with the other arguments of the launch", self.at(key), hints)
        if key in MEANT:
            hints = [f"{MEANT[key]} {_shown(value)}".replace(" True", "")]
        elif names_a_tensor(key, value):
            said = f"{said}: unknown, and its name suggests that it decides the size of a tensor"
        return diagnostic("MP913", said, self.at(key), hints)

    def _lacking(self) -> Diagnostic:
        """MP916 for required arguments that are missing, in one diagnostic."""
        named = ", ".join(map(flag, self._missing))
        said = f"{named} {'is' if len(self._missing) == 1 else 'are'} missing"
        words = " ".join(f"{flag(key)} N" for key in self._missing)
        hint = "--set batch.seq_length=N" if self._missing == ["seq_length"] else f"megaplan import megatron {self.name} -- {words}"
        return diagnostic("MP916", said, self.at(self._missing[0]), (hint,))

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """One warning that lists the arguments without a counterpart in a spec, and notes about assumptions and omissions."""
        found = self._reported and [
            diagnostic("MP915", "\n".join(self._reported.values()), self.at(next(iter(self._reported))), severity=Severity.WARNING)
        ]
        return (*(found or ()), *dict.fromkeys(self._notes), *self._omissions)

    @property
    def _omissions(self) -> tuple[Diagnostic, ...]:
        """Notes about parts of the text that were not followed."""
        return tuple(
            diagnostic("MP919", why, Location(self.name, line or None), severity=Severity.NOTE) for line, why in self._given.left_out
        )


def name_of(key: str) -> str:
    """`tensor_model_parallel_size` for `--tensor-model-parallel-size`."""
    return str(key).lstrip("-").replace("-", "_")


def changes_nothing(key: str) -> bool:
    """True for a known argument that affects nothing in a spec."""
    return key in IGNORED or key in OLDER_IGNORED or key.startswith(IGNORED_PREFIXES)


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
