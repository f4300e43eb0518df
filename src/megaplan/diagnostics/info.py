"""What the catalogue knows about one code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """One entry of the catalogue, printed by `megaplan explain CODE`.

    Attributes:
        summary: Fixed first line, without user values.
        means: What was found.
        why: Why it is refused or reported.
        fix: How to repair it.
        example: A few lines of input, wrong and right.
    """

    summary: str
    means: str
    why: str
    fix: str
    example: str
