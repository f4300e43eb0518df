"""Diagnostics of the command line: one function per diagnostic (MP48x, MP499)."""

import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from shlex import quote, split

from megaplan.diagnostics import diagnostic, refuse
from megaplan.errors import Diagnostic, MegaplanError

MAX_LISTED = 40
"""Up to this number of names, all are shown; of more names, only the nearest."""
_EXTRA = re.compile(r"unexpected extra argument\S* \((.*)\)", re.DOTALL)
_COMMANDS = {
    **dict.fromkeys(("memory", "mem", "vram", "fit", "fits", "plan", "simulate", "profile", "predict", "time", "step"), "estimate"),
    **dict.fromkeys(("partition", "stages", "cut", "cuts", "pipeline", "balance"), "split"),
    **dict.fromkeys(("tune", "autotune", "optimize", "optimise", "auto", "layouts"), "search"),
    **dict.fromkeys(("goodput", "days", "cost", "train"), "run"),
    **dict.fromkeys(("validate", "lint", "verify"), "check"),
    **dict.fromkeys(("init", "create"), "new"),
    "compare": "diff",
    "convert": "import",
    "gpus": "devices",
}
"""Commands by the names that other tools use for them."""
_OPTIONS = {"batch.seq_length": "--seq"}
"""Options that set a key of another name."""


def bug(error: Exception) -> Diagnostic:
    """An unexpected exception."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "megaplan" in frame.filename.replace("\\", "/").split("/")] or frames
    place = ""
    if ours:
        inside = ours[-1].filename.replace("\\", "/").rpartition("/megaplan/")[2]
        place = f" at {inside}:{ours[-1].lineno} in {ours[-1].name}"
    return diagnostic("MP499", f"{type(error).__name__}: {error}{place}", hints=("report it with the command and the file that caused it",))


def settings_meant(error: Exception, words: Sequence[str]) -> tuple[str, ...]:
    """Commands, options or arguments of `--set` that the user may have meant by words which the parser does not accept.

    Empty for any other error.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    command = getattr(context, "command", None)
    known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
    if getattr(command, "commands", None) and words and words[0] in _COMMANDS:
        return (" ".join(("megaplan", _COMMANDS[words[0]], *map(quote, words[1:]))),)
    if "--set" not in known:
        return ()
    if not isinstance(option, str):
        extra = _EXTRA.search(str(getattr(error, "message", "")))
        return _loose_settings(words, extra[1].split()) if extra else ()
    from megaplan.spec.other_names import GLOBAL_BATCH, GPUS, keys_named  # noqa: PLC0415
    from megaplan.spec.overrides import settings_named  # noqa: PLC0415

    name, value = option.lstrip("-"), _value_of(option, words)
    plain = name.lower().replace("-", "_")
    is_length = plain == "seq_length" or keys_named("", plain) == ("batch.seq_length",)
    sizes = {"--gpus": plain in GPUS, "--global-batch": plain in GLOBAL_BATCH, "--seq": is_length}
    found = [f"{own} {value}" for own, is_meant in sizes.items() if is_meant and own in known]
    return tuple(found) or settings_named(name, value)


def as_typed(found: Diagnostic, words: Sequence[str]) -> Diagnostic:
    """A diagnostic about a change that another option than `--set` states: its place and its hints name the option, whose value counts."""
    given = (found.location.file or "").removeprefix("--set ")
    holder = next((option for option, text in pairwise(words) if text == given and option.startswith("--")), "--set")
    if holder != "--set":
        hints = tuple(f"{holder} {hint.removeprefix('--set ')}" if hint.startswith("--set ") else hint for hint in found.hints)
        return replace(found, location=found.location._replace(file=f"{holder} {given}"), hints=hints)
    key, separator, value = given.partition("=")
    option = _OPTIONS.get(key) or f"--{key.rpartition('.')[2].replace('_', '-')}"
    if not separator or given in words or not any(word == option or word.startswith(f"{option}=") for word in words):
        return found
    hints = tuple(_as_option(hint, key, option) for hint in found.hints)
    return replace(found, location=found.location._replace(file=f"{option} {value}"), hints=hints)


def _as_option(hint: str, key: str, option: str) -> str:
    words = split(hint) if hint.startswith(f"--set {key}=") or hint.startswith(f"--set '{key}=") else ()
    if len(words) != 2:
        return hint
    value = words[1].partition("=")[2]
    return f"leave {option} out" if value == "null" else f"{option} {quote(value)}"


def _loose_settings(words: Sequence[str], extra: Sequence[str]) -> tuple[str, ...]:
    """One hint with all settings of a command line, if the words that no option accepts are `KEY=VALUE`, or the VALUE of `--set KEY`."""
    from megaplan.spec.overrides import is_setting  # noqa: PLC0415

    found, loose, taken = list[str](), False, 0
    for index, word in enumerate(words):
        if index < taken:
            continue
        if word == "--set" and index + 1 < len(words):
            setting, taken = words[index + 1], index + 2
            if "=" not in setting and words[taken : taken + 1] and words[taken] in extra:
                setting, taken, loose = f"{setting}={words[taken]}", index + 3, True
            found.append(setting)
        elif word in extra and is_setting(word):
            found.append(word)
            loose = True
    return (" ".join(f"--set {quote(setting)}" for setting in found),) if loose else ()


def _value_of(option: str, words: Sequence[str]) -> str:
    """The value of an option in a command line; `true` where it has none."""
    for index, word in enumerate(words):
        if word == option:
            return words[index + 1] if index + 1 < len(words) and not words[index + 1].startswith("--") else "true"
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return "true"


def unknown_name(code: str, name: str, known: Iterable[str], hint: str) -> MegaplanError:
    """An exception for a name that is not in `known`, with the nearest names as hints."""
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5) or get_close_matches(name.upper(), names, n=3, cutoff=0.5)
    if len(names) > MAX_LISTED:
        return refuse(code, f"{name!r} is unknown", *(hint.format(match) for match in (*near, "list")))
    return refuse(code, f"{name!r} is not one of: {', '.join(names)}", *(hint.format(match) for match in near))
