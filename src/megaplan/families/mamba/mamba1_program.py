"""Operations of M blocks of Mamba-1, their saved tensors and work.

The scan keeps its inputs and the fp32 state before every `save_every` positions. All channels share the step's latent, B and C, so under
TP they are summed over the group, in forward and backward.

Source: arXiv:2312.00752, section 3.
"""

from functools import cache

from megakernels.facts import KernelScratch
from megakernels.ops.causal_conv1d.facts import CONVOLUTION, causal_conv1d
from megakernels.ops.rms_norm.facts import norm as rms_norm_work
from megakernels.ops.selective_scan.facts import SelectiveSizes
from megaplan.blocks.costs import gate_work, linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, linear, norm, output_ops, plain_norm
from megaplan.blocks.storages import (
    Shapes,
    convolution,
    exchange,
    exchanged_storages,
    handed_storages,
    inside_storages,
    lane_of,
    mixer_storages,
    num_lanes,
    of_pieces,
    piece_positions,
    residual,
    scan_op,
    sums_separately,
)
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.dtypes import DType
from megaplan.families.family import Selective
from megaplan.families.mamba.section import Mamba1

PART = "M"
_PARTS = ("dt_latent", "B", "C")
_NORMS = ("dt_norm", "B_norm", "C_norm")
MAMBA1 = Selective(
    "mix",
    frozenset({"in_proj", "split", exchange("conv1d"), "conv1d", "x_proj", "sum steps", "split steps", *_NORMS, "dt_proj"}),
    caches={"selective_scan": "selective_scan", "gate": "swiglu"},
)


def selective_sizes(mamba: Mamba1, batch: int, positions: int, channels: int, itemsize: int) -> SelectiveSizes:
    """Sizes of Mamba-1's scan over these channels."""
    return SelectiveSizes(batch, positions, channels, mamba.state_dim, mamba.save_every, itemsize)


def selective_inside(dims: Dims, mamba: Mamba1, channels: int, parameters: DType) -> KernelScratch | None:
    """Kernel scratch of Mamba-1's scan over these channels of this rank; arguments and result as for the other scans."""
    run = lane_of(dims, channels, channels)
    sizes = selective_sizes(mamba, dims.batch, run.positions, run.heads, dims.dtype.bytes)
    if not sizes.accepted:
        return None
    state_bytes = sizes.forward_bytes().last
    copied = 0 if dims.cp == 1 else run.copied_states(dims, sizes.segments, sizes.segments * state_bytes) + run.copied_starts
    backward = sizes.backward_bytes(parameters.bytes * run.heads * (mamba.state_dim + 2), copied)
    return run.inside(dims, sizes.forward_bytes(run.copied_starts), backward, 0, 0, with_starts=False)


def mamba1_work(load: Workload, mamba: Mamba1, hidden_size: int) -> Works:
    """One M block of Mamba-1, pre-norm and residual included; `tp` shards its channels."""
    channels = mamba.expand * hidden_size // load.tp
    rank, state, size = mamba.step_width(hidden_size), mamba.state_dim, load.itemsize
    norms: Works = ()
    if mamba.inner_norm != "none":
        work = rms_norm_work(rank, size) + rms_norm_work(state, size) * 2
        norms = (OpWork("inner norms", PART, work, counts=("dt_norm", "B_norm", "C_norm")),)
    scan = selective_sizes(mamba, load.sequences, load.positions, channels, size)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "in_proj", PART, hidden_size, 2 * channels),
        OpWork("conv1d", PART, causal_conv1d(channels, mamba.conv_kernel, size), CONVOLUTION),
        linear_work(load, "x_proj", PART, channels, rank + 2 * state),
        *norms,
        linear_work(load, "dt_proj", PART, rank, channels),
        OpWork("selective_scan", "scan", scan.work(load.seq_length), scan),
        gate_work(load, PART, channels),
        linear_work(load, "out_proj", PART, channels, hidden_size, closes=True),
    )


def mamba1_program(dims: Dims, mamba: Mamba1, parameters: DType) -> tuple[BlockProgram, Shapes]:
    """One M block of Mamba-1."""
    options = mamba.conv_bias, mamba.bias, mamba.inner_norm != "none", mamba.inner_norm == "scaled"
    inside = selective_inside(dims, mamba, mamba.expand * dims.hidden // dims.tp, parameters) if dims.kernels else None
    program = _program(*options, dims.tp > 1, dims.cp > 1, inside is not None, sums_separately(dims, parameters))
    return program, residual(_storages(dims, mamba) | inside_storages(dims, inside))


@cache
def _program(
    conv_bias: bool, bias: bool, normed: bool, scaled: bool, sharded: bool, handed: bool, kernels: bool, summed: bool
) -> BlockProgram:
    inputs = ("x_conv", "dt", *(("B_normed", "C_normed") if normed else ("B", "C")))
    params = ("conv1d.weight", "conv1d.bias") if conv_bias else ("conv1d.weight",)
    scanned = ("A_log", "D", "dt_bias")
    ops = (
        *input_ops(Projection("in_proj", "projected", "in_proj.weight", "in_proj.bias" if bias else None), sharded=sharded),
        cut("split", "projected", ("x_in", "z")),
        *convolution("conv1d", "x_in", "x_conv", params, handed=handed),
        linear("x_proj", "x_conv", "own_steps" if sharded else "steps", "x_proj.weight"),
        *((Op("sum steps", ("own_steps",), ("steps",)),) if sharded else ()),
        cut("split steps", "steps", _PARTS),
        *(_inner_norms(scaled=scaled) if normed else ()),
        linear("dt_proj", "dt_latent_normed" if normed else "dt_latent", "dt", "dt_proj.weight"),
        scan_op("selective_scan", inputs, "y", ("states",), scanned, handed=handed, summed=summed, inside=(kernels, kernels)),
        Op("gate", ("y", "z"), ("gated",), keeps=("y", "z")),
        *output_ops("gated", sharded=sharded, bias="out_proj.bias" if bias else None),
    )
    return MAMBA1.program(*ops)


def _inner_norms(*, scaled: bool) -> tuple[Op, ...]:
    """RMSNorms of the step's latent, B and C, with a scale or without."""
    return tuple(
        norm(name, part, f"{part}_normed", f"{part}_rstd", f"{name}.weight")
        if scaled
        else plain_norm(name, part, f"{part}_normed", f"{part}_")
        for name, part in zip(_NORMS, _PARTS, strict=True)
    )


def _storages(dims: Dims, mamba: Mamba1) -> Shapes:
    channels, wide = mamba.expand * dims.hidden // dims.tp, dims.wide
    widths = dict(zip(_PARTS, (mamba.step_width(dims.hidden), mamba.state_dim, mamba.state_dim), strict=True))
    shapes = {
        "projected": wide(2 * channels),
        **dict.fromkeys(("x_in", "z", "x_conv", "dt", "y", "gated"), wide(channels)),
        **dict.fromkeys(("own_steps", "steps"), wide(sum(widths.values()))),
        **{part: wide(width) for part, width in widths.items()},
        **{f"{part}_normed": wide(width) for part, width in widths.items()},
        **{f"{part}_ones": (width,) for part, width in widths.items()},
    }
    scan = selective_sizes(mamba, dims.batch, piece_positions(dims), channels, dims.dtype.bytes)
    statistics: dict[str, tuple[int, ...]] = {
        "states": of_pieces(dims, scan.states),
        **{f"{part}_rstd": wide() for part in _PARTS},
    }
    carried: Shapes = {}
    if dims.cp > 1:
        statistics["summed"] = (channels * (mamba.state_dim + 2),)  # gradients of A_log, D and dt_bias
        carried = handed_storages(dims, channels, num_lanes(channels, dims.cp), mamba.state_dim)
        carried |= exchanged_storages(dims, "x_conv", mamba.conv_kernel, channels)
    return carried | mixer_storages(dims, shapes, statistics)
