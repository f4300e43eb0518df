"""Facts of the depthwise convolution between two gates, y = b · conv(a · x) (arXiv:2511.23404, section 2)."""

from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, Pass, Passes, PlainPass, PlainPasses, Work, ceil_div

POSITIONS_PER_SHARE = 128
"""Positions whose share of the taps' gradients one program makes."""
PLAIN = PlainPasses(PlainPass(1030, launches=11), PlainPass(1780, launches=37))
GATED_FORWARD_POSITIONS = 64
"""Positions of a program of the forward."""
GATED_CHANNELS = 256
"""Largest number of channels of a program."""


class GatedConvolutionSizes(NamedTuple):
    """Sizes of a call; `itemsize` is the bytes of an element of x."""

    batch: int
    positions: int
    channels: int
    taps: int
    bias: bool
    itemsize: int

    def work(self) -> Work:
        """Ideal work: 2·C·K FLOPs each for y, the inputs' gradients and dW; backward repeats the convolution.

        Bytes: a, b, x and y forward; a, b, x, dy and three gradients backward.

        Source: counting multiply-adds and operands.
        """
        flops, moved = 2 * self.channels * self.taps, self.channels * self.itemsize
        return Work(flops, 2 * flops, flops, flops, moved_forward=4 * moved, moved_input=7 * moved)

    def kernels(self, work: Work, tokens: int) -> Passes:
        """One kernel each way; backward also shares of the taps' gradients, each of some positions, their sum, and a copy a parameter."""
        shares = self.batch * ceil_div(self.positions, POSITIONS_PER_SHARE) * (self.taps + 1) * self.channels * SUMS_BYTES
        flops = (work.input_grad + work.weight_grad) * tokens
        forward = Pass(work.moved_forward * tokens, work.forward * tokens, 1)
        return forward, Pass(work.moved_input * tokens + 2 * shares, flops, 3 + self.bias)

    def plain(self, work: Work, tokens: int) -> Passes:
        """Both passes by plain torch: every intermediate goes through memory."""
        return PLAIN.passes(work, tokens)
