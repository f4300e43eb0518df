"""A formula of the cost model as text, for `megaplan explain`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Formula:
    """One formula as a person reads it.

    Attributes:
        summary: The counted quantity, in one line.
        formula: Formula with the field's symbols, each defined in it.
        unit: Unit of the result.
        source: Paper and equation, or the counting argument.
        example: The formula with numbers, `expression = value`.
    """

    summary: str
    formula: str
    unit: str
    source: str
    example: str
