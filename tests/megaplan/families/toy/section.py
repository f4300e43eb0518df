"""The section `model.toy`: dimensions of T blocks."""

from megaplan.scalars import PositiveInt, Section


class Toy(Section):
    """Two matrices through a bottleneck.

    Attributes:
        rank: Width of the bottleneck.
    """

    rank: PositiveInt
