"""The section `model.mlp`: dimensions of D blocks."""

from __future__ import annotations

from typing import ClassVar

from megaplan.scalars import DenseActivation, OptionsSection, PositiveFloat, PositiveInt, StrictBool


class Mlp(OptionsSection):
    """The dense MLP of a D block.

    Attributes:
        ffn_hidden_size: Inner width.
        activation: swiglu or geglu (three matrices), relu2, gelu or xielu (two); xielu has two learned numbers.
        bias: Bias on every projection.
        gate_multiplier: Factor of the gate before the activation.
        output_multiplier: Factor of the block's output, before it is added to the stream.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias", "gate_multiplier", "output_multiplier"})

    ffn_hidden_size: PositiveInt
    activation: DenseActivation = "swiglu"
    bias: StrictBool = False
    gate_multiplier: PositiveFloat = 1.0
    output_multiplier: PositiveFloat = 1.0
