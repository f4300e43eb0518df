"""A formula of the cost model as text, for `megaplan explain`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Formula:
    """One formula as a person reads it.

    Attributes:
        summary: What it counts, in one line.
        formula: With the field's symbols, all of them defined in it.
        unit: Of the result.
        source: Paper and equation, or the counting argument.
        example: The formula with numbers, `expression = value`.
    """

    summary: str
    formula: str
    unit: str
    source: str
    example: str
