"""What the catalogue knows about one code."""

from __future__ import annotations

from typing import NamedTuple


class CodeInfo(NamedTuple):
    """One entry of the catalogue, printed by `megaplan explain CODE`.

    Attributes:
        summary: Fixed first line, without user values.
        means: The condition that was found.
        why: The reason that it is refused or reported.
        fix: The way to repair it.
        example: A few lines of input, wrong and right.
    """

    summary: str
    means: str
    why: str
    fix: str
    example: str
