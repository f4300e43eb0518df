"""Work of the operations of C blocks: projections and a gated depthwise convolution.

Source: arXiv:2511.23404, section 2.
"""

from __future__ import annotations

from megakernels.ops.gated_conv1d.facts import GatedConvolutionSizes
from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.families.short_convolution.section import ShortConvolution
from megaplan.families.short_convolution.tensors import PROJECTIONS

PART = "C"


def short_convolution_work(load: Workload, short: ShortConvolution, hidden_size: int, _variant: None = None) -> Works:
    """One C block, pre-norm and residual included; `tp` shards its channels."""
    channels = hidden_size // load.tp
    convolution = GatedConvolutionSizes(load.sequences, load.positions, channels, short.conv_kernel, short.bias, load.itemsize)
    return (
        residual_work(load, PART, hidden_size),
        *(linear_work(load, f"{name}_proj", PART, hidden_size, channels) for name in PROJECTIONS),
        OpWork("gated_conv", PART, convolution.work(), convolution),
        linear_work(load, "out_proj", PART, channels, hidden_size, closes=True),
    )
