"""Diagnostics of the command line: one function per diagnostic (MP48x, MP499)."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
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


def unknown_name(code: str, name: str, known: Iterable[str], hint: str) -> MegaplanError:
    """An exception for a name that is not in `known`, with the nearest names as hints."""
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5) or get_close_matches(name.upper(), names, n=3, cutoff=0.5)
    if len(names) > MAX_LISTED:
        return refuse(code, f"{name!r} is unknown", *(hint.format(match) for match in (*near, "list")))
    return refuse(code, f"{name!r} is not one of: {', '.join(names)}", *(hint.format(match) for match in near))
