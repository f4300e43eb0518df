"""Saved tensors of M blocks: Mamba-2 and Mamba-3; Mamba-1 is in `mamba1_program`.

in_proj makes one storage; its parts are views of it, kept once (docs/decisions/0002). Mamba-3's scan keeps its inputs (views of in_proj's
output, the angles, normed B and C), and state and phase at each segment's start; it gates and projects its output itself, and recomputes
what each rank reads in backward.
"""

from __future__ import annotations

from functools import cache

from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, norm, output_ops
from megaplan.blocks.storages import (
    PIECES,
    Shapes,
    convolution,
    exchange,
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
from megaplan.families.mamba.composition import scan_inside, scan_sizes
from megaplan.families.mamba.mamba1_program import MAMBA1, mamba1_program
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3, num_mamba_heads

MAMBA2 = Selective(
    "mix",
    frozenset({"in_proj", "scale parts", "split", exchange("conv1d"), "conv1d", "split conv"}),
    # later operations read their outputs in backward anyway; saved, they do not run twice
    caches={"ssd": "ssd", "gated_norm": "gated_rms_norm", "gate": "swiglu"},
)
MAMBA3 = Selective("mix", frozenset({"in_proj", "angle_proj", "split", "B_norm", "C_norm"}), caches={"scan": "mamba3"})


def mamba_selective(mamba: Mamba1 | Mamba2 | Mamba3, _variant: None) -> Selective:
    """Operations of an M block that selective recompute runs again."""
    if isinstance(mamba, Mamba1):
        return MAMBA1
    return MAMBA2 if isinstance(mamba, Mamba2) else MAMBA3


def mamba_program(
    dims: Dims, mamba: Mamba1 | Mamba2 | Mamba3, _variant: None, _operations: None, parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """One M block."""
    if isinstance(mamba, Mamba1):
        return mamba1_program(dims, mamba, parameters)
    sharded, handed, summed = dims.tp > 1, dims.cp > 1, sums_separately(dims, parameters)
    heads, groups = num_mamba_heads(mamba, dims.hidden) // dims.tp, mamba.num_groups // dims.tp
    if isinstance(mamba, Mamba2):
        inside = scan_inside(dims, mamba, heads, groups, parameters) if dims.kernels else None
        options = mamba.conv_bias, mamba.bias, mamba.gated_norm, mamba.part_multipliers is not None
        program = _mamba2_program(*options, sharded, handed, inside is not None, summed)
        return program, residual(_mamba2_storages(dims, mamba) | inside_storages(dims, inside))
    inside = scan_inside(dims, mamba, heads, groups, parameters) if dims.kernels else None
    program = _mamba3_program(mamba.num_angles > 0, mamba.mimo_rank > 1, sharded, handed, inside is not None, summed)
    return program, residual(_mamba3_storages(dims, mamba) | inside_storages(dims, inside))


@cache
def _mamba2_program(
    conv_bias: bool, bias: bool, gated_norm: bool, scaled: bool, sharded: bool, handed: bool, kernels: bool, summed: bool
) -> BlockProgram:
    inputs = ("conv_x", "dt", "conv_B", "conv_C")
    ops = (
        *input_ops(Projection("in_proj", "projected", "in_proj.weight", "in_proj.bias" if bias else None), sharded=sharded),
        *((Op("scale parts", ("projected",), ("scaled",)),) if scaled else ()),
        cut("split", "scaled" if scaled else "projected", ("z", "conv_in", "dt")),
        *convolution("conv1d", "conv_in", "conv", ("conv1d.weight", "conv1d.bias") if conv_bias else ("conv1d.weight",), handed=handed),
        cut("split conv", "conv", ("conv_x", "conv_B", "conv_C")),
        scan_op("ssd", inputs, "y", ("states",), ("A_log", "D", "dt_bias"), handed=handed, summed=summed, inside=(kernels, kernels)),
        Op("gated_norm", ("y", "z"), ("gated", "gated_rstd"), keeps=("y", "z", "gated_rstd"), params=("gated_norm.weight",))
        if gated_norm
        else Op("gate", ("y", "z"), ("gated",), keeps=("y", "z")),
        *output_ops("gated", sharded=sharded, bias="out_proj.bias" if bias else None),
    )
    return MAMBA2.program(*ops)


def _mamba2_storages(dims: Dims, mamba: Mamba2) -> Shapes:
    heads = num_mamba_heads(mamba, dims.hidden) // dims.tp
    inner, groups = heads * mamba.head_dim, mamba.num_groups // dims.tp
    state, wide = groups * mamba.state_dim, dims.wide
    shapes = {
        **dict.fromkeys(("projected", "scaled"), wide(2 * inner + 2 * state + heads)),
        "z": wide(inner),
        "conv_in": wide(inner + 2 * state),
        "dt": wide(heads),
        "conv": wide(inner + 2 * state),
        "conv_x": wide(inner),
        "conv_B": wide(state),
        "conv_C": wide(state),
        "y": wide(inner),
        "states": _states(dims, mamba, heads),
        "gated": wide(inner),
    }
    statistics: dict[str, tuple[int, ...]] = {"gated_rstd": wide(groups)}
    carried: Shapes = {}
    if dims.cp > 1:
        statistics["summed"] = (3 * heads,)  # gradients of dt_bias, A_log and D
        carried = handed_storages(dims, heads, num_lanes(groups, dims.cp), mamba.head_dim, mamba.state_dim)
        carried |= exchanged_storages(dims, "conv", mamba.conv_kernel, inner + 2 * state)
    return mixer_storages(dims, shapes, statistics) | carried


@cache
def _mamba3_program(angles: bool, mimo: bool, sharded: bool, handed: bool, kernels: bool, summed: bool) -> BlockProgram:
    steps = ("dt", "A", "trapezoid")
    inputs = ("x_in", "z", "B_normed", "C_normed", *steps, *(("angles",) if angles else ()))
    starting = ("states", *(("phases",) if angles else ()), *(("ahead",) if handed else ()))
    ops = (
        *input_ops(
            Projection("in_proj", "projected", "in_proj.weight"),
            *((Projection("angle_proj", "angles", "angle_proj.weight"),) if angles else ()),
            sharded=sharded,
        ),
        cut("split", "projected", ("z", "x_in", "B", "C", *steps)),
        norm("B_norm", "B", "B_normed", "B_rstd", "B_norm.weight"),
        norm("C_norm", "C", "C_normed", "C_rstd", "C_norm.weight"),
        scan_op(
            "scan",
            inputs,
            "gated",
            starting,
            ("B_bias", "C_bias", "D", "dt_bias", *(("mimo_x", "mimo_z", "mimo_o") if mimo else ())),
            handed=handed,
            summed=summed,
            inside=(kernels, kernels),
            fetches=("ahead_gradient",) if handed else (),
        ),
        *output_ops("gated", sharded=sharded),
    )
    return MAMBA3.program(*ops)


def _mamba3_storages(dims: Dims, mamba: Mamba3) -> Shapes:
    heads = num_mamba_heads(mamba, dims.hidden) // dims.tp
    inner, groups = heads * mamba.head_dim, mamba.num_groups // dims.tp
    state, wide = groups * mamba.mimo_rank * mamba.state_dim, dims.wide
    shapes = {
        "projected": wide(2 * inner + 2 * state + 3 * heads),
        "z": wide(inner),
        "x_in": wide(inner),
        "angles": wide(mamba.num_angles),
        "states": _states(dims, mamba, heads),
        "gated": wide(inner),
        **{name: wide(state) for name in ("B", "C", "B_normed", "C_normed")},
        **{name: wide(heads) for name in ("dt", "A", "trapezoid")},
    }
    statistics = dict.fromkeys(("B_rstd", "C_rstd"), wide(groups * mamba.mimo_rank))
    statistics["phases"] = (*_states(dims, mamba, heads)[:3], mamba.num_angles)
    carried: Shapes = {}
    if dims.cp > 1:
        of_mimo_rank = 2 * mamba.state_dim + (3 * mamba.head_dim if mamba.mimo_rank > 1 else 0)  # of the biases of B and C; x, z and o
        statistics["summed"] = (heads * (mamba.mimo_rank * of_mimo_rank + 2),)  # gradients of D and dt_bias
        statistics |= dict.fromkeys(("ahead", "ahead_gradient"), (dims.batch, PIECES, heads))
        travelling = mamba.head_dim * mamba.state_dim + mamba.num_angles
        carried = handed_storages(dims, heads, num_lanes(groups, dims.cp), travelling)
    return mixer_storages(dims, shapes, statistics) | carried


def _states(dims: Dims, mamba: Mamba2 | Mamba3, heads: int) -> tuple[int, ...]:
    """Shape of the saved states; under CP those of each piece."""
    groups = mamba.num_groups // dims.tp
    return of_pieces(dims, scan_sizes(mamba, dims.batch, piece_positions(dims), heads, groups, dims.dtype.bytes).states)
