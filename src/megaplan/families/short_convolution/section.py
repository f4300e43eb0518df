"""The section `model.short_convolution`: dimensions of C blocks."""

from typing import ClassVar

from megaplan.scalars import OptionsSection, PositiveInt, StrictBool


class ShortConvolution(OptionsSection):
    """A causal depthwise convolution between two gates, as wide as the residual stream (LFM2, arXiv:2511.23404).

    Attributes:
        conv_kernel: Taps of the causal convolution.
        bias: Bias on the projections and the convolution.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias"})

    conv_kernel: PositiveInt = 3
    bias: StrictBool = False
