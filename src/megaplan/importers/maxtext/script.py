"""`key=value` arguments of MaxText in a text: those of a script's training command, with the script's variables replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.maxtext.keys import SLICE, SLICES
from megaplan.importers.variables import replaced, variables

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


def training_words(text: str, name: str) -> tuple[dict[str, Any], bool, str]:
    """The arguments of a script, whether they are a command's, and a sentence about which of its commands is read.

    Of several training commands, one whose variables are set and with the most arguments is taken, of equal ones the last. Without any, all
    arguments of the text count, unless its programs do something else.

    Raises:
        MegaplanError: MP926, no command trains one model.
    """
    plain = "\n".join(line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#"))
    whole = replaced(plain, variables(plain))
    commands = [dict(words(line)) for line in whole.splitlines() if _TRAINS.search(line)]
    commands = [each for each in commands if each]
    if not commands:
        _refuse_other(plain, text, name)
        return dict(words(whole)), False, ""
    read = max(reversed(commands), key=lambda each: (not any("$" in str(value) for value in each.values()), len(each)))
    others = f"{len(commands)} commands train; the one with the most arguments is read, or the last of several" if len(commands) > 1 else ""
    return read, True, others


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
