"""C blocks: a short causal convolution between two gates."""

from torch import Tensor, nn

from megaplan.families.short_convolution.tensors import PROJECTIONS
from megaplan.spec import models as spec
from megarun.model.mamba import Convolution
from megarun.model.norm import MixerBlock, RMSNorm, RowLinear, linear
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.relay_conv import convolve_gated
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class ShortConvolutionBlock(MixerBlock):
    """C: three projections → output_gate · causal convolution(input_gate · value) → out_proj.

    Under TP a rank has a share of the channels. Under CP the convolution receives the products before each sequence piece from the previous
    one.

    Source: arXiv:2511.23404, section 2.
    """

    def __init__(
        self, config: spec.ShortConvolution, hidden_size: int, eps: float, tp: TensorParallel = ALONE, cp: ContextParallel = WHOLE
    ) -> None:
        super().__init__()
        self.tp, self.cp, channels = tp, cp, tp.share(hidden_size)
        self.norm = RMSNorm(hidden_size, eps)
        for name in PROJECTIONS:
            self.add_module(f"{name}_proj", linear(hidden_size, channels, config.bias))
        self.conv = Convolution(channels, config.conv_kernel, config.bias, cp)
        self.out_proj = RowLinear(channels, hidden_size, config.bias, tp)

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, C]: everything between the block's norm and out_proj."""
        projections: list[nn.Linear] = [getattr(self, f"{name}_proj") for name in PROJECTIONS]
        input_gate, output_gate, value = self.tp.project(normed, *projections)
        del normed  # freed under full recompute, in which no projection saves it
        return convolve_gated(self.cp, input_gate, output_gate, value, self.conv.weight, self.conv.bias, starts)
