"""Facts of the causal depthwise convolution with activation."""

from __future__ import annotations

from megakernels.facts import Multiple, Multiples, Plain, PlainPass, Share, Work

LARGEST_KERNEL = 4
"""Largest number of taps that the kernels of causal and gated convolutions take: three earlier positions stay in registers."""
CONVOLUTION = Multiples(
    Multiple(kinds=(Share("convolution.forward"),)),
    Multiple(106, 4, kinds=(Share("convolution.backward", launches=4),)),
    Plain(PlainPass(2300, launches=12), PlainPass(4360, launches=38)),
)


def causal_conv1d(channels: int, kernel: int, itemsize: int) -> Work:
    """Depthwise convolution with activation: 2·C·K FLOPs each for y, dx and dW; two activations forward, three backward.

    Source: counting multiply-adds.
    """
    flops = 2 * channels * kernel
    return Work(flops, flops, flops, moved_forward=2 * channels * itemsize, moved_input=3 * channels * itemsize)
