"""Work of C blocks: projections and a gated depthwise convolution."""

from __future__ import annotations

from megaplan.blocks.costs import linear_op, residual_op
from megaplan.blocks.work import Op, Ops, Work, Workload
from megaplan.families.short_convolution.section import ShortConvolution
from megaplan.families.short_convolution.tensors import PROJECTIONS

PART = "C"


def gated_conv1d(load: Workload, channels: int, kernel: int) -> Work:
    """Y = b · conv(a · x), depthwise: 2·C·K FLOPs each for y, the inputs' gradients and dW; backward repeats the convolution.

    Bytes: a, b, x and y forward; a, b, x, dy and three gradients backward.

    Source: counting multiply-adds and operands.
    """
    flops = 2 * channels * kernel
    return Work(flops, 2 * flops, flops, flops, moved_forward=4 * channels * load.itemsize, moved_input=7 * channels * load.itemsize)


def short_convolution_work(load: Workload, short: ShortConvolution, hidden_size: int, _variant: None = None) -> Ops:
    """One C block, pre-norm and residual included; `tp` shards its channels.

    Source: arXiv:2511.23404, section 2.
    """
    channels = hidden_size // load.tp
    return (
        residual_op(load, PART, hidden_size),
        *(linear_op(load, f"{name}_proj", PART, hidden_size, channels) for name in PROJECTIONS),
        Op("gated_conv", PART, gated_conv1d(load, channels, short.conv_kernel)),
        linear_op(load, "out_proj", PART, channels, hidden_size, closes=True),
    )
