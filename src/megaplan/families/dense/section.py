"""The section `model.mlp`: dimensions of D blocks."""

from __future__ import annotations

from megaplan.scalars import Activation, PositiveInt, Section


class Mlp(Section):
    """The dense MLP of a D block.

    Attributes:
        ffn_hidden_size: Inner width.
        activation: swiglu (three matrices), relu2 or gelu (two).
    """

    ffn_hidden_size: PositiveInt
    activation: Activation = "swiglu"
