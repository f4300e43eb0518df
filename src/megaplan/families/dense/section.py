"""The section `model.mlp`: dimensions of D blocks."""

from __future__ import annotations

from typing import ClassVar

from megaplan.scalars import Activation, OptionsSection, PositiveInt, StrictBool


class Mlp(OptionsSection):
    """The dense MLP of a D block.

    Attributes:
        ffn_hidden_size: Inner width.
        activation: swiglu or geglu (three matrices), relu2 or gelu (two).
        bias: Bias on every projection.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias"})

    ffn_hidden_size: PositiveInt
    activation: Activation = "swiglu"
    bias: StrictBool = False
