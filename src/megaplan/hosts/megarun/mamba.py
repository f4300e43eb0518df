"""What M blocks keep: Mamba-2 and Mamba-3.

in_proj makes one storage; its parts are views of it, kept once (docs/decisions/0002). Mamba-3's scan keeps its inputs (views of in_proj's
output, the angles, normed B and C), and state and phase at each chunk's start; it gates and projects its output itself, and recomputes
what each rank reads in backward.
"""

from __future__ import annotations

from functools import cache

from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.attention import recomputed
from megaplan.hosts.megarun.dims import Dims
from megaplan.hosts.megarun.hand_off import PIECES, before, convolution, handed_shape, num_lanes, piecewise, summed_shape
from megaplan.hosts.megarun.inside import INSIDE, INSIDE_BACKWARD, inside_storages, scan_inside
from megaplan.hosts.megarun.ops import Op, Projection, add, cut, linear, norm, partial_gradient, project
from megaplan.hosts.megarun.parts import Part, Shapes, residual, storages
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.inventory.mamba import num_mamba_heads
from megaplan.spec.models import Mamba2, Mamba3

SELECTIVE = frozenset({"in_proj", "split", "conv1d", "split conv"})


def mamba_part(dims: Dims, mamba: Mamba2 | Mamba3, parameters: DType, *, policy: str, kernels: bool) -> Part:
    """One M block.

    Args:
        dims: Local sizes.
        mamba: The model's section.
        parameters: Dtype of the parameters' gradients.
        policy: What is recomputed.
        kernels: Whether Triton's kernels are chosen.
    """
    sharded, handed = dims.tp > 1, dims.cp > 1
    if isinstance(mamba, Mamba2):
        heads, groups = num_mamba_heads(mamba, dims.hidden) // dims.tp, mamba.num_groups // dims.tp
        inside = scan_inside(dims, mamba, heads, groups, parameters) if kernels else None
        run = _mamba2_replay(mamba.conv_bias, sharded, handed, inside is not None, policy)
        return Part(run, residual(_mamba2_storages(dims, mamba, parameters) | inside_storages(dims, inside)))
    run = _mamba3_replay(mamba.num_angles > 0, mamba.mimo_rank > 1, sharded, handed, policy)
    return Part(run, residual(_mamba3_storages(dims, mamba)))


@cache
def _mamba2_replay(conv_bias: bool, sharded: bool, handed: bool, kernels: bool, policy: str) -> Replay:
    inputs = ("conv_x", "dt", "conv_B", "conv_C")
    state, sums = (("handed",), ("summed",)) if handed else ((), ())
    forward, backward = ((INSIDE,), (INSIDE_BACKWARD,)) if kernels else ((), ())
    ops = (
        *_input_ops(sharded, Projection("in_proj", "projected", "in_proj.weight")),
        cut("split", "projected", ("z", "conv_in", "dt")),
        convolution("conv1d", "conv_in", "conv", ("conv1d.weight", "conv1d.bias") if conv_bias else ("conv1d.weight",), handed=handed),
        cut("split conv", "conv", ("conv_x", "conv_B", "conv_C")),
        Op(
            "ssd",
            inputs,
            ("y", "states", *state, *forward),
            keeps=(*inputs, "states"),
            params=("A_log", "D", "dt_bias"),
            fetches=(*state, *sums, *backward),
        ),
        Op("gated_norm", ("y", "z"), ("gated", "gated_rstd"), keeps=("y", "z", "gated_rstd"), params=("gated_norm.weight",)),
        *_output_ops("gated", sharded),
    )
    return replay(ops, region=recomputed(ops, SELECTIVE, policy), cached=frozenset({"y", "states", "gated", "gated_rstd"}))


def _mamba2_storages(dims: Dims, mamba: Mamba2, parameters: DType) -> Shapes:
    heads = num_mamba_heads(mamba, dims.hidden) // dims.tp
    inner, groups = heads * mamba.head_dim, mamba.num_groups // dims.tp
    state, wide = groups * mamba.state_dim, dims.wide
    shapes = {
        "projected": wide(2 * inner + 2 * state + heads),
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
    if dims.cp > 1:
        shapes["summed"] = summed_shape(3 * heads, parameters, dims.dtype)
        shapes[before("conv")] = (dims.batch, PIECES, mamba.conv_kernel - 1, inner + 2 * state)
        lanes = num_lanes(groups, dims.cp)
        statistics["handed"] = handed_shape(dims.batch, heads, lanes, mamba.head_dim, mamba.state_dim)
    return _common(dims, shapes) | storages(dims.stat_dtype, Column.ACTIVATIONS, statistics)


@cache
def _mamba3_replay(angles: bool, mimo: bool, sharded: bool, handed: bool, policy: str) -> Replay:
    steps = ("dt", "A", "trapezoid")
    inputs = ("x_in", "z", "B_normed", "C_normed", *steps, *(("angles",) if angles else ()))
    starting = ("states", *(("phases",) if angles else ()), *(("ahead",) if handed else ()))
    state = ("handed",) if handed else ()
    ops = (
        *_input_ops(
            sharded,
            Projection("in_proj", "projected", "in_proj.weight"),
            *((Projection("angle_proj", "angles", "angle_proj.weight"),) if angles else ()),
        ),
        cut("split", "projected", ("z", "x_in", "B", "C", *steps)),
        norm("B_norm", "B", "B_normed", "B_rstd", "B_norm.weight"),
        norm("C_norm", "C", "C_normed", "C_rstd", "C_norm.weight"),
        Op(
            "scan",
            inputs,
            ("gated", *starting, *state),
            keeps=(*inputs, *starting),
            params=("B_bias", "C_bias", "D", "dt_bias", *(("mimo_x", "mimo_z", "mimo_o") if mimo else ())),
            fetches=state,
        ),
        *_output_ops("gated", sharded),
    )
    region = frozenset({"in_proj", "angle_proj", "split", "B_norm", "C_norm"})
    return replay(ops, region=recomputed(ops, region, policy), cached=frozenset({"gated", *starting}))


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
    if dims.cp > 1:
        statistics["ahead"] = (dims.batch, PIECES, heads)
        carried = mamba.head_dim * mamba.state_dim + mamba.num_angles
        statistics["handed"] = handed_shape(dims.batch, heads, num_lanes(groups, dims.cp), carried)
    return _common(dims, shapes) | storages(dims.stat_dtype, Column.ACTIVATIONS, statistics)


def _input_ops(sharded: bool, *projections: Projection) -> tuple[Op, ...]:
    return norm("norm", "x", "normed", "rstd", "norm.weight"), *project("normed", "gathered", *projections, sharded=sharded)


def _output_ops(reads: str, sharded: bool) -> tuple[Op, ...]:
    return (
        linear("out_proj", reads, "partial" if sharded else "o", "out_proj.weight"),
        *((Op("reduce_scatter", ("partial",), ("o",)),) if sharded else ()),
        add("residual", ("x", "o"), "out"),
    )


def _states(dims: Dims, mamba: Mamba2 | Mamba3, heads: int) -> tuple[int, ...]:
    """State at each chunk's start: [B, ceil(T / chunk_size), H, P, S]; under CP the chunks of each piece."""
    return (dims.batch, piecewise(dims.tokens, mamba.chunk_size, handed=dims.cp > 1), heads, mamba.head_dim, mamba.state_dim)


def _common(dims: Dims, shapes: dict[str, tuple[int, ...]]) -> Shapes:
    own = dict.fromkeys(("normed", "o", "out"), dims.residual)
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, {**shapes, **own}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {"rstd": dims.residual[:2]}),
        **storages(dims.dtype, Column.COMMUNICATION, dict.fromkeys(("gathered", partial_gradient("gathered"), "partial"), dims.gathered)),
    }
