"""Expressions of sed that replace one text by another, without special characters."""

import re
from collections.abc import Sequence

SUBSTITUTES = re.compile(r"s([/|,#])([\w :\"-]+)\1([^\\&/|,#\n]*)\1(g?)")


def replaced(text: str, rules: Sequence[str]) -> str:
    """The text after the rules, applied in order: each replaces the first match per line, or with `g` all matches."""
    for match in map(SUBSTITUTES.fullmatch, rules):
        if match is not None:
            text = "\n".join(line.replace(match[2], match[3], -1 if match[4] else 1) for line in text.split("\n"))
    return text
