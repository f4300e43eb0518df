"""What R blocks keep: M²RNN, with fp32 states every `save_every` tokens and after the last; under CP so for each of two pieces."""

from __future__ import annotations

from functools import cache

from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.attention import recomputed
from megaplan.hosts.megarun.dims import Dims
from megaplan.hosts.megarun.hand_off import (
    ARRIVING,
    HANDED,
    PIECES,
    convolution,
    exchanged_storages,
    handed_storages,
    num_lanes,
    piecewise,
    sums_apart,
)
from megaplan.hosts.megarun.inside import INSIDE, INSIDE_BACKWARD, inside_storages, recurrence_inside
from megaplan.hosts.megarun.ops import Op, Projection, add, cut, linear, norm, partial_gradient, project
from megaplan.hosts.megarun.parts import Part, Shapes, residual, storages
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.spec.models import MatrixRecurrence

SELECTIVE = frozenset({"m2rnn", "gated_norm"})


def recurrent_part(dims: Dims, recurrent: MatrixRecurrence, parameters: DType, *, policy: str, kernels: bool) -> Part:
    """One R block.

    Args:
        dims: Local sizes.
        recurrent: The model's section.
        parameters: Dtype of the parameters' gradients.
        policy: What is recomputed.
        kernels: Whether Triton's kernels are chosen.
    """
    heads, keys = recurrent.num_heads // dims.tp, recurrent.key_dim
    inner, wide = heads * recurrent.value_dim, dims.wide
    shapes = {name: wide(inner) for name in ("v_proj", "v", "y", "gate", "gated")}
    shapes |= {"qk_proj": wide(2 * keys), "qk": wide(2 * keys), "q": wide(keys), "k": wide(keys), "forget": wide(heads)}
    shapes |= dict.fromkeys(("normed", "o", "out"), dims.residual)
    handed = dims.cp > 1
    num_states = piecewise(dims.tokens, recurrent.save_every, handed=handed) + (PIECES if handed else 1)
    statistics = {
        "rstd": dims.residual[:2],
        "gated_rstd": wide(1),
        "gated_dot": wide(1),
        "states": (dims.batch, num_states, heads, keys, recurrent.value_dim),
    }
    carried: Shapes = {}
    if handed:
        statistics["summed"] = (heads * (recurrent.value_dim * (recurrent.value_dim + 1) + 2),)  # of state_map, D, dt_bias and A_log
        carried = handed_storages(dims, heads, num_lanes(heads, dims.cp), keys, recurrent.value_dim)
        carried |= exchanged_storages(dims, "qk", recurrent.conv_kernel, 2 * keys)
        carried |= exchanged_storages(dims, "v", recurrent.conv_kernel, inner)
    inside = recurrence_inside(dims, recurrent, heads, parameters) if kernels else None
    tensors = {
        **inside_storages(dims, inside),
        **carried,
        **storages(dims.dtype, Column.ACTIVATIONS, shapes),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, statistics),
        **storages(dims.dtype, Column.COMMUNICATION, dict.fromkeys(("gathered", partial_gradient("gathered"), "partial"), dims.gathered)),
    }
    return Part(_replay(dims.tp > 1, handed, inside is not None, sums_apart(dims, parameters), policy), residual(tensors))


@cache
def _replay(sharded: bool, handed: bool, kernels: bool, apart: bool, policy: str) -> Replay:
    projections = (("qk_proj", "qk_proj"), ("v_proj", "v_proj"), ("forget_proj", "forget"), ("gate_proj", "gate"))
    inputs = ("q", "k", "v", "forget")
    state, sums = (HANDED, ARRIVING) if handed else (), ("summed",) if apart else ()
    forward, backward = (INSIDE,) if kernels and handed else (), (INSIDE_BACKWARD,) if kernels else ()
    ops = (
        norm("norm", "x", "normed", "rstd", "norm.weight"),
        *project("normed", "gathered", *(Projection(name, made, f"{name}.weight") for name, made in projections), sharded=sharded),
        *convolution("conv_qk", "qk_proj", "qk", ("conv_qk.weight", "conv_qk.bias"), handed=handed),
        cut("split qk", "qk", ("q", "k")),
        *convolution("conv_v", "v_proj", "v", ("conv_v.weight", "conv_v.bias"), handed=handed),
        Op(
            "m2rnn",
            inputs,
            ("y", "states", *state, *forward),
            keeps=(*inputs, "states"),
            params=("state_map", "D", "dt_bias", "A_log"),
            fetches=(*state, *backward),
            sums=sums,
        ),
        Op(
            "gated_norm",
            ("y", "gate"),
            ("gated", "gated_rstd"),
            keeps=("y", "gate", "gated_rstd"),
            params=("gated_norm.weight",),
            fetches=("gated_dot",) if sharded else (),  # summed over the group, as the squares are
        ),
        linear("out_proj", "gated", "partial" if sharded else "o", "out_proj.weight"),
        *((Op("reduce_scatter", ("partial",), ("o",)),) if sharded else ()),
        add("residual", ("x", "o"), "out"),
    )
    held = frozenset({"qk", "v", "forget", "gate"})  # locals of forward
    return replay(ops, held, region=recomputed(ops, SELECTIVE, policy))
