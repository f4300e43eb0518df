"""The section `model.mlp`: dimensions of D blocks."""

from __future__ import annotations

from typing import ClassVar

from megaplan.scalars import DenseActivation, OptionsSection, PositiveFloat, PositiveInt, StrictBool

INNER_NORM = "inner_norm"
"""Name of the norm over an MLP's inner values."""


class Mlp(OptionsSection):
    """The dense MLP of a D block.

    Attributes:
        ffn_hidden_size: Inner width.
        activation: swiglu, geglu or relu2glu (three matrices), relu2, gelu or xielu (two); xielu has two learned numbers.
        inner_norm: RMSNorm over the inner values, between activation and the last matrix.
        bias: Bias on every projection.
        gate_multiplier: Factor of the gate before the activation.
        output_multiplier: Factor of the block's output, before it is added to the stream.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias", "inner_norm", "gate_multiplier", "output_multiplier"})

    ffn_hidden_size: PositiveInt
    activation: DenseActivation = "swiglu"
    inner_norm: StrictBool = False
    bias: StrictBool = False
    gate_multiplier: PositiveFloat = 1.0
    output_multiplier: PositiveFloat = 1.0
