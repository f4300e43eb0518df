"""Operations of C blocks, their saved tensors and work.

They save the outputs of three projections, from which backward computes the gated product and its convolution again.
Source: arXiv:2511.23404, section 2.
"""

from functools import cache

from megakernels.ops.gated_conv1d.facts import GatedConvolutionSizes
from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, input_ops, output_ops
from megaplan.blocks.storages import Shapes, exchange, exchanged_storages, mixer_storages, residual
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.family import Selective
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


SELECTIVE = Selective("mix", frozenset({*(f"{name}_proj" for name in PROJECTIONS), exchange("gated_conv")}))


def short_convolution_selective(_short: ShortConvolution, _variant: None) -> Selective:
    """Operations of a C block that selective recompute runs again."""
    return SELECTIVE


def short_convolution_program(
    dims: Dims, short: ShortConvolution, _variant: None, _operations: None, _parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """One C block."""
    channels, handed = dims.hidden // dims.tp, dims.cp > 1
    shapes = dict.fromkeys((*PROJECTIONS, "mixed"), dims.wide(channels))
    carried = exchanged_storages(dims, "mixed", short.conv_kernel, channels) if handed else {}
    return _program(short.bias, dims.tp > 1, handed), residual(carried | mixer_storages(dims, shapes, {}))


@cache
def _program(bias: bool, sharded: bool, handed: bool) -> BlockProgram:
    projections = (Projection(f"{name}_proj", name, f"{name}_proj.weight", f"{name}_proj.bias" if bias else None) for name in PROJECTIONS)
    params = ("conv.weight", "conv.bias") if bias else ("conv.weight",)
    ops = (
        *input_ops(*projections, sharded=sharded),
        *_convolution(params, handed=handed),
        *output_ops("mixed", sharded=sharded, bias="out_proj.bias" if bias else None),
    )
    return SELECTIVE.program(*ops)


def _convolution(params: tuple[str, ...], *, handed: bool) -> tuple[Op, ...]:
    """The gated convolution; under CP with the products before each piece, which the ranks exchange."""
    if not handed:
        return (Op("gated_conv", PROJECTIONS, ("mixed",), keeps=PROJECTIONS, params=params),)
    before, ends, moved = "mixed_before", "mixed_ends", "mixed_moved"
    return (
        Op(exchange("gated_conv"), PROJECTIONS, (before, ends), grads=()),
        Op(
            "gated_conv",
            (*PROJECTIONS, before),
            ("mixed",),
            keeps=(*PROJECTIONS, before),
            params=params,
            grads=PROJECTIONS,
            fetches=(moved, ends),
        ),
    )
