"""Variables of a launch's text that are set nowhere: each stays in the text between two NUL characters until an argument needs it.

A name in parentheses is a program whose output is not known, and one behind a question mark a variable that the script requires: neither is
empty.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from megaplan.errors import Diagnostic

MOST_PLACES = 32
UNSET = re.compile("\0([^\0]*)\0")
PRESENT = ("(", "?")
"""Beginnings of names whose text is not empty."""


def unset(name: str) -> str:
    """The text of a variable that is set nowhere."""
    return f"\0{name}\0"


def required(name: str) -> str:
    """The text of a variable that a script requires, and that is set nowhere."""
    return unset(f"?{name}")


def without_unset(text: str) -> str:
    """A text in which variables that are set nowhere are empty; outputs of programs and required variables stay."""
    return UNSET.sub(lambda found: found[0] if found[1].startswith(PRESENT) else "", text)


def unset_names(text: str) -> list[str]:
    """Names of the unset variables in a text."""
    return [name.removeprefix("?") for name in UNSET.findall(text)]


def remedies(names: Sequence[str], file: str) -> list[str]:
    """Options that set variables, and the command with as many arguments as a script lacks."""
    places = [int(name) for name in names if name.isdecimal()]
    words = " ".join(f"ARG{place}" for place in range(1, min(max(places, default=0), MOST_PLACES) + 1))
    return [
        *(f"--env {name}=…" for name in names if not name.isdecimal()),
        *([f"megaplan import megatron {file} -- {words}"] if words else []),
    ]


def together(found: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Diagnostics, each once; those of variables that are set nowhere are one, whose hint sets all of them."""
    own = list(dict.fromkeys(found))
    several = [each for each in own if each.code == "MP918"]
    if len(several) < 2:
        return own
    hints = dict.fromkeys(hint for each in several for hint in each.hints)
    options = " ".join(hint for hint in hints if hint.startswith("--env "))
    others = [hint for hint in hints if not hint.startswith("--env ")]
    detail = "\n".join(each.detail for each in several)
    whole = replace(several[0], detail=detail, hints=(*([options] if options else []), *others))
    return [whole if each is several[0] else each for each in own if each is several[0] or each.code != "MP918"]


def readable(text: str) -> str:
    """A text with `$NAME` for each unset variable."""
    return UNSET.sub(lambda found: f"${found[1].removeprefix('?')}", text)
