"""Operations of R blocks, M²RNN: their work and saved tensors, with fp32 states every `save_every` tokens and after the last.

Under CP both are of two pieces. Source: arXiv:2603.14360.
"""

from functools import cache

from megakernels.facts import KernelScratch
from megakernels.ops.causal_conv1d.facts import CONVOLUTION, causal_conv1d
from megakernels.ops.m2rnn.facts import RecurrenceSizes
from megakernels.ops.rms_norm.facts import GATED_NORM, gated_norm
from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, output_ops
from megaplan.blocks.storages import (
    Shapes,
    convolution,
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
from megaplan.families.recurrent.section import MatrixRecurrence

PART = "R"


def recurrence_sizes(recurrent: MatrixRecurrence, batch: int, positions: int, heads: int, itemsize: int) -> RecurrenceSizes:
    """Sizes of the recurrence of these heads."""
    return RecurrenceSizes(batch, positions, heads, recurrent.key_dim, recurrent.value_dim, recurrent.save_every, itemsize)


def recurrence_inside(dims: Dims, recurrent: MatrixRecurrence, heads: int, parameters: DType) -> KernelScratch | None:
    """Kernel scratch of the recurrence of these heads of this rank; None if the kernels do not support its sizes.

    Args:
        dims: Local sizes.
        recurrent: The model's section.
        heads: Heads of this rank.
        parameters: Dtype of the parameters' gradients.
    """
    run = lane_of(dims, heads, heads)
    sizes = recurrence_sizes(recurrent, dims.batch, run.positions, run.heads, dims.dtype.bytes)
    if not sizes.accepted:
        return None
    forward, backward = sizes.forward_bytes(), sizes.backward_bytes((parameters.bytes,) * 4, run.copied_starts)
    starts = max(0, run.copied_starts - backward.last)  # freed before the last state is copied
    return run.inside(dims, forward._replace(scratch=starts), backward, sizes.states[1], backward.last, with_starts=False)


def recurrent_work(load: Workload, recurrent: MatrixRecurrence, hidden_size: int, _variant: None = None) -> Works:
    """One R block, pre-norm and residual included.

    `tp` shards the heads; q and k, which all heads share, are projected on every rank. The recurrence takes one step per position of a
    sequence, whatever runs concurrently.
    """
    heads, shared, kernel, size = recurrent.num_heads // load.tp, 2 * recurrent.key_dim, recurrent.conv_kernel, load.itemsize
    inner = heads * recurrent.value_dim
    recurrence = recurrence_sizes(recurrent, load.sequences, load.positions, heads, size)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "qk_proj", PART, hidden_size, shared),
        linear_work(load, "v_proj", PART, hidden_size, inner),
        linear_work(load, "forget_proj", PART, hidden_size, heads),
        linear_work(load, "gate_proj", PART, hidden_size, inner),
        OpWork("conv_qk", PART, causal_conv1d(shared, kernel, size), CONVOLUTION),
        OpWork("conv_v", PART, causal_conv1d(inner, kernel, size), CONVOLUTION),
        OpWork("m2rnn", "recurrence", recurrence.work(load.seq_length), recurrence, num_steps=load.seq_length),
        OpWork("gated_norm", PART, gated_norm(inner, 1, size), GATED_NORM),
        linear_work(load, "out_proj", PART, inner, hidden_size, closes=True),
    )


SELECTIVE = Selective("core", frozenset({"m2rnn", "gated_norm"}))


def recurrent_selective(_recurrent: MatrixRecurrence, _variant: None) -> Selective:
    """Operations of an R block that selective recompute runs again."""
    return SELECTIVE


def recurrent_program(
    dims: Dims, recurrent: MatrixRecurrence, _variant: None, _operations: None, parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """One R block."""
    heads, keys = recurrent.num_heads // dims.tp, recurrent.key_dim
    inner, wide = heads * recurrent.value_dim, dims.wide
    shapes = {name: wide(inner) for name in ("v_proj", "v", "y", "gate", "gated")}
    shapes |= {"qk_proj": wide(2 * keys), "qk": wide(2 * keys), "q": wide(keys), "k": wide(keys), "forget": wide(heads)}
    handed = dims.cp > 1
    recurrence = recurrence_sizes(recurrent, dims.batch, piece_positions(dims), heads, dims.dtype.bytes)
    statistics = {
        "gated_rstd": wide(1),
        "gated_dot": wide(1),
        "states": of_pieces(dims, recurrence.states),
    }
    carried: Shapes = {}
    if handed:
        statistics["summed"] = (heads * (recurrent.value_dim * (recurrent.value_dim + 1) + 2),)  # state_map, D, dt_bias, A_log
        carried = handed_storages(dims, heads, num_lanes(heads, dims.cp), keys, recurrent.value_dim)
        carried |= exchanged_storages(dims, "qk", recurrent.conv_kernel, 2 * keys)
        carried |= exchanged_storages(dims, "v", recurrent.conv_kernel, inner)
    inside = recurrence_inside(dims, recurrent, heads, parameters) if dims.kernels else None
    tensors = inside_storages(dims, inside) | carried | mixer_storages(dims, shapes, statistics)
    return _program(dims.tp > 1, handed, inside is not None, sums_separately(dims, parameters)), residual(tensors)


@cache
def _program(sharded: bool, handed: bool, kernels: bool, summed: bool) -> BlockProgram:
    projections = (("qk_proj", "qk_proj"), ("v_proj", "v_proj"), ("forget_proj", "forget"), ("gate_proj", "gate"))
    inputs = ("q", "k", "v", "forget")
    params = ("state_map", "D", "dt_bias", "A_log")
    ops = (
        *input_ops(*(Projection(name, made, f"{name}.weight") for name, made in projections), sharded=sharded),
        *convolution("conv_qk", "qk_proj", "qk", ("conv_qk.weight", "conv_qk.bias"), handed=handed),
        cut("split qk", "qk", ("q", "k")),
        *convolution("conv_v", "v_proj", "v", ("conv_v.weight", "conv_v.bias"), handed=handed),
        scan_op("m2rnn", inputs, "y", ("states",), params, handed=handed, summed=summed, inside=(kernels and handed, kernels)),
        Op(
            "gated_norm",
            ("y", "gate"),
            ("gated", "gated_rstd"),
            keeps=("y", "gate", "gated_rstd"),
            params=("gated_norm.weight",),
            fetches=("gated_dot",) if sharded else (),  # reduced over the group, like the sums of squares
        ),
        *output_ops("gated", sharded=sharded),
    )
    held = frozenset({"qk", "v", "forget", "gate"})  # locals of forward
    return SELECTIVE.program(*ops, held=held)
