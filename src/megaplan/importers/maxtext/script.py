"""`key=value` arguments of MaxText in a text: those of a script's training command, with the script's variables replaced."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.maxtext.keys import DEFAULTS, SLICE, SLICES
from megaplan.importers.variables import replaced, variables
from megaplan.spec.read import display_name, file_of, read_text

WORD = re.compile(r"""(?<![\w.$-])([a-z][a-z0-9_]*)=("[^"]*"|'[^']*'|\[[^\]]*\]|[^\s"'\\]*)""")
"""An argument of MaxText in a script; names of environment variables have capital letters."""
_TRAINS = re.compile(
    r"""(?:\bmaxtext|\bMaxText)[\w.]*\.["']?(?:train|train_compile|train_sft(?:_native)?|sft_trainer)\b"""
    r"""|\b(?:train(?:_compile|_sft(?:_native)?)?|sft_trainer)\.py\b"""
)
"""A program of MaxText that trains one model, or that compiles a training step."""
_PROGRAM = re.compile(r"""\bpython3? +(?:-[mu] +)*["']?([\w./-]*(?:[Mm]ax[Tt]ext|_)[\w./-]*)""")
XPK = {SLICE: re.compile(r"--(?:device|tpu)[-_]type[= ]([\w-]+)"), SLICES: re.compile(r"--num[-_]slices[= ](\d+)")}
"""Options of the launcher that say the slice."""
_RUNNER = re.compile(r"""\bpython3? +(?:-[mu] +)*["']?([\w./-]*benchmark_runner)\b""")
"""A program of MaxText that starts runs from a list in its code."""
_OTHER_PROGRAMS = {
    r"decode|inference|maxengine": "inference",
    r"ckpt|chkpt|checkpoint|convert|orbax|to_maxtext|to_huggingface": "the conversion of a checkpoint",
    r"(?:\b|_)rl(?:\b|_)|grpo|distill|dpo": "training with further models next to the one that learns",
    r"logit|eval|estimator": "a check of a model",
}
"""Parts of the names of MaxText's programs that do not train one model."""


_STARTED = re.compile(r"""(?:^|[\s;&|"'])(?:(?:ba)?sh|source|\.)?[ \t]*["']?([\w./${}-]*[\w-]\.sh)\b["']?([^\n;&|]*)""", re.MULTILINE)
"""A script that another one starts, and its arguments."""
MOST_SCRIPTS = 4
"""Most scripts that start each other."""
_PLACES = re.compile(r"\$(\{?)(\d)(?!\d)")


def words(text: str) -> Iterator[tuple[str, Any]]:
    """Names and values of `key=value` words; a value is read as YAML reads it."""
    for match in WORD.finditer(text):
        value = match[2].strip("\"'")
        try:
            found = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            found = value
        yield match[1], number_of(found)


def number_of(value: Any) -> Any:
    """The number of a text such as 1e-6 or 1_000, which YAML 1.1 or 1.2 does not read as a number."""
    if not isinstance(value, str) or not re.fullmatch(r"\d+(\.\d+)?[eE][-+]?\d+|\d{1,3}(_\d{3}){1,5}", value):
        return value
    return int(value) if "_" in value else float(value)


def training_words(text: str, name: str, depth: int = MOST_SCRIPTS) -> tuple[dict[str, Any], bool, str]:
    """The arguments of a script, whether they are a command's, and a sentence about which of its commands is read.

    Of several training commands, one whose variables are set and with the most arguments is taken, of equal ones the last. Without any, the
    script that it starts is read, and else all arguments of the text count, unless its programs do something else.

    Args:
        text: Text of the script.
        name: Path of the script.
        depth: Most scripts that may follow.

    Raises:
        MegaplanError: MP926, no command trains one model; MP916, the script that has the command is not here.
    """
    plain = "\n".join(line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))
    whole = replaced(plain, variables(plain))
    commands = [dict(words(line)) for line in whole.splitlines() if _TRAINS.search(line)]
    commands = [each for each in commands if each]
    if not commands:
        _refuse_other(plain, text, name)
        started = _started(whole, name) if depth and not dict(words(whole)).keys() & DEFAULTS.keys() else None
        if started is not None:
            found, inside, said = training_words(*started, depth - 1)
            return found, inside, "; ".join(filter(None, (f"it starts {display_name(started[1])}, which is read", said)))
        return dict(words(whole)), False, ""
    read = max(reversed(commands), key=lambda each: (not any("$" in str(value) for value in each.values()), len(each)))
    others = f"{len(commands)} commands train; the one with the most arguments is read, or the last of several" if len(commands) > 1 else ""
    return read, True, others


def _started(whole: str, name: str) -> tuple[str, str] | None:
    """The text of a script that another one starts, with the variables of both and its arguments, and its path; None if it trains nothing.

    Raises:
        MegaplanError: MP916, no script that it starts is here.
    """
    missing: dict[str, int] = {}
    for match in _STARTED.finditer(whole):
        path = match[1].rpartition("}")[2].lstrip("/") if "$" in match[1] else match[1]
        found = file_of(path, name) if path else None
        if found is None:
            missing |= {path: whole.count("\n", 0, match.start(1)) + 1}
        elif _TRAINS.search(text := read_text(found)):
            try:
                given = shlex.split(match[2].split('"')[0] if match[2].count('"') % 2 else match[2])
            except ValueError:
                given = []
            own = "\n".join(f"ARGUMENT_{place}={shlex.quote(word)}" for place, word in enumerate(given, start=1))
            return "\n".join([own, whole, _PLACES.sub(r"$\1ARGUMENT_\2", text)]), found
    if not missing:
        return None
    path, line = next(iter(missing.items()))
    hint = f"megaplan import maxtext {shlex.quote(path)}   # with the path of that script here, and the run's own key=value"
    detail = f"{name} has no key of MaxText, and starts {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not here"
    raise MegaplanError([diagnostic("MP916", detail, Location(name, line), (hint,))])


def _refuse_other(plain: str, text: str, name: str) -> None:
    """Refuses a script whose programs of MaxText, in its text without comments, do not train one model."""
    if (match := _RUNNER.search(plain)) is not None:
        named = re.search(r"--model_name[= ]+[\"']?([\w.-]+)", plain)
        detail = f"{name} starts {match[1]}, whose file of Python states the keys of --model_name {named[1] if named else '…'}"
        at = Location(name, text.count("\n", 0, text.index(match[1])) + 1)
        options = " ".join(f"{key}={found[1]}" for key, pattern in XPK.items() if (found := pattern.search(text)))
        hint = f"megaplan import maxtext base.yml model_name=… {options}".rstrip() + "   # with the keys of that entry"
        raise MegaplanError([diagnostic("MP926", detail, at, (hint,))])
    for program in (match[1] for match in _PROGRAM.finditer(plain)):
        what = next((what for part, what in _OTHER_PROGRAMS.items() if re.search(part, program, re.IGNORECASE)), None)
        if what is not None:
            detail = f"{name} starts {program}: {what}; a spec describes the training of a decoder of text"
            at = Location(name, text.count("\n", 0, text.index(program)) + 1)
            raise MegaplanError([diagnostic("MP926", detail, at, ("megaplan import maxtext TRAINING.sh",))])
