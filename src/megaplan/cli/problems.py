"""Diagnostics of the command line: one function per diagnostic (MP48x, MP499)."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from megaplan.diagnostics import diagnostic, refuse
from megaplan.errors import Diagnostic, MegaplanError

MAX_LISTED = 40
"""Largest number of names that are all shown; of more, only the nearest are."""


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
    """Options, or arguments of `--set`, that an option which the command does not have may have meant; empty for any other error."""
    option = getattr(error, "option_name", None)
    command = getattr(getattr(error, "ctx", None), "command", None)
    known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
    if not isinstance(option, str) or "--set" not in known:
        return ()
    from megaplan.spec.other_names import GLOBAL_BATCH, GPUS, keys_named  # noqa: PLC0415
    from megaplan.spec.overrides import settings_named  # noqa: PLC0415

    name, value = option.lstrip("-"), _value_of(option, words)
    plain = name.lower().replace("-", "_")
    is_length = plain == "seq_length" or keys_named("", plain) == ("batch.seq_length",)
    sizes = {"--gpus": plain in GPUS, "--global-batch": plain in GLOBAL_BATCH, "--seq": is_length}
    found = [f"{own} {value}" for own, is_meant in sizes.items() if is_meant and own in known]
    return tuple(found) or settings_named(name, value)


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
