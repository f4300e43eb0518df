"""Facts of the causal depthwise convolution with activation."""

from megakernels.facts import FixedRatios, KernelPass, KindShare, PlainPass, PlainPasses, Work

LARGEST_KERNEL = 4
"""Largest number of taps that the kernels of causal and gated convolutions take: three earlier positions stay in registers."""
CONVOLUTION = FixedRatios(
    KernelPass(kinds=(KindShare("convolution.forward"),)),
    KernelPass(106, 4, kinds=(KindShare("convolution.backward", launches=4),)),
    PlainPasses(PlainPass(2300, launches=12), PlainPass(4360, launches=38)),
)

CONV_FORWARD_POSITIONS = 64
"""Positions of a program of the forward."""
CONV_BACKWARD_POSITIONS = 256
"""Positions of a program of the backward."""
CONV_FORWARD_CHANNELS = 256
"""Largest number of channels of a program of the forward."""
CONV_BACKWARD_BYTES = 512
"""Largest number of bytes of a position's channels in a program of the backward."""


def causal_conv1d(channels: int, kernel: int, itemsize: int) -> Work:
    """Depthwise convolution with activation: 2·C·K FLOPs each for y, dx and dW; two activations forward, three backward.

    Source: counting multiply-adds.
    """
    flops = 2 * channels * kernel
    return Work(flops, flops, flops, moved_forward=2 * channels * itemsize, moved_input=3 * channels * itemsize)
