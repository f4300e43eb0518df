"""The section `model.mlp`: dimensions of D blocks."""

from typing import ClassVar

from megaplan.scalars import DenseActivation, NaturalInt, OptionsSection, PositiveFloat, PositiveInt, Section, StrictBool

INNER_NORM = "inner_norm"
"""Name of the norm over an MLP's inner values."""


class LayerWidth(Section):
    """An inner width of some layers.

    Attributes:
        layers: D layers with it: 0-based global indices, rising.
        ffn_hidden_size: The width.
    """

    layers: tuple[NaturalInt, ...]
    ffn_hidden_size: PositiveInt


class Mlp(OptionsSection):
    """The dense MLP of a D block.

    Attributes:
        ffn_hidden_size: Inner width.
        layer_widths: Other inner widths of some layers.
        activation: swiglu, geglu or relu2glu (three matrices), relu2, gelu or xielu (two); xielu has two learned numbers.
        inner_norm: RMSNorm over the inner values, between activation and the last matrix.
        bias: Bias on every projection.
        gate_multiplier: Factor of the gate before the activation.
        output_multiplier: Factor of the block's output, before it is added to the stream.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias", "inner_norm", "layer_widths", "gate_multiplier", "output_multiplier"})

    ffn_hidden_size: PositiveInt
    layer_widths: tuple[LayerWidth, ...] = ()
    activation: DenseActivation = "swiglu"
    inner_norm: StrictBool = False
    bias: StrictBool = False
    gate_multiplier: PositiveFloat = 1.0
    output_multiplier: PositiveFloat = 1.0

    def own_width(self, layer: int, _place: int) -> int | None:
        """Inner width of a layer, by its global index, if it is not the section's; None for that one."""
        return next((own.ffn_hidden_size for own in self.layer_widths if layer in own.layers), None)
