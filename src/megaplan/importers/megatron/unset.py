"""Variables of a launch's text that are set nowhere: each stays in the text between two NUL characters until an argument needs it."""

from __future__ import annotations

import re

UNSET = re.compile("\0([^\0]*)\0")


def unset(name: str) -> str:
    """The text of a variable that is set nowhere."""
    return f"\0{name}\0"


def unset_names(text: str) -> list[str]:
    """Names of the unset variables in a text."""
    return UNSET.findall(text)


def readable(text: str) -> str:
    """A text with `$NAME` for each unset variable."""
    return UNSET.sub(r"$\1", text)
