"""Saved tensors of R blocks: M²RNN, with fp32 states every `save_every` tokens and after the last; under CP for each of two pieces."""

from __future__ import annotations

from functools import cache

from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, output_ops
from megaplan.blocks.storages import (
    Shapes,
    convolution,
    exchanged_storages,
    handed_storages,
    inside_storages,
    mixer_storages,
    num_lanes,
    of_pieces,
    piece_positions,
    residual,
    scan_op,
    sums_separately,
)
from megaplan.dtypes import DType
from megaplan.families.family import Selective
from megaplan.families.recurrent.composition import recurrence_inside, recurrence_sizes
from megaplan.families.recurrent.section import MatrixRecurrence

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
            fetches=("gated_dot",) if sharded else (),  # summed over the group, as the squares are
        ),
        *output_ops("gated", sharded=sharded),
    )
    held = frozenset({"qk", "v", "forget", "gate"})  # locals of forward
    return SELECTIVE.program(*ops, held=held)
