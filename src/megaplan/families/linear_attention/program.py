"""Operations of G blocks, gated delta net and Kimi delta attention: their saved tensors and work.

q and k are views of one convolution's output. The delta rule keeps its inputs and the fp32 state before every `save_every` positions; under
CP so for each of two pieces. The gated norm normalises each head, so it keeps one statistic a head.

Source: arXiv:2412.06464, figure 1; arXiv:2510.26692, section 4.
"""

from functools import cache

from megakernels.facts import KernelScratch
from megakernels.ops.causal_conv1d.facts import CONVOLUTION, causal_conv1d
from megakernels.ops.gated_delta.facts import DeltaSizes
from megakernels.ops.rms_norm.facts import GATED_NORM, gated_norm
from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, linear, output_ops
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
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention

PART = "G"


def delta_sizes(
    linear: GatedDeltaNet | KimiDeltaAttention, batch: int, positions: int, heads: int, key_heads: int, itemsize: int
) -> DeltaSizes:
    """Sizes of the delta rule over these heads."""
    rows, settings = isinstance(linear, KimiDeltaAttention), (linear.chunk_size, linear.save_every, itemsize)
    return DeltaSizes(batch, positions, heads, key_heads, linear.key_dim, linear.value_dim, rows, *settings)


def delta_inside(
    dims: Dims, linear: GatedDeltaNet | KimiDeltaAttention, heads: int, key_heads: int, parameters: DType
) -> KernelScratch | None:
    """Kernel scratch of the delta rule, in bytes.

    Args:
        dims: Local sizes.
        linear: The model's section.
        heads: Value heads of this rank.
        key_heads: Key heads of this rank.
        parameters: Dtype of the parameters' gradients.

    Returns:
        None if the kernels do not support these sizes.
    """
    run = lane_of(dims, heads, key_heads)
    sizes = delta_sizes(linear, dims.batch, run.positions, run.heads, run.groups, dims.dtype.bytes)
    if not sizes.accepted:
        return None
    forward, backward = sizes.forward_bytes(), sizes.backward_bytes(parameters.bytes * run.heads * sizes.shares)
    return run.inside(dims, forward, backward, sizes.states[1], forward.last)


def linear_attention_work(load: Workload, linear: GatedDeltaNet | KimiDeltaAttention, hidden_size: int, _variant: None = None) -> Works:
    """One G block, pre-norm and residual included; `tp` shards the heads; every rank projects the latents of Kimi delta attention."""
    heads, kernel, size = linear.num_value_heads // load.tp, linear.conv_kernel, load.itemsize
    key_heads = linear.num_key_heads // load.tp
    keys, values = key_heads * linear.key_dim, heads * linear.value_dim
    if linear.has_latents:
        width = linear.key_dim
        gates: Works = (
            linear_work(load, "latent_proj", PART, hidden_size, 2 * width),
            linear_work(load, "decay_up", PART, width, heads * width),
            linear_work(load, "gate_up", PART, width, heads * width),
        )
    else:
        gates = (
            linear_work(load, "decay_proj", PART, hidden_size, keys if isinstance(linear, KimiDeltaAttention) else heads),
            linear_work(load, "gate_proj", PART, hidden_size, values),
        )
    rule = delta_sizes(linear, load.sequences, load.positions, heads, key_heads, size)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "qk_proj", PART, hidden_size, 2 * keys),
        linear_work(load, "v_proj", PART, hidden_size, values),
        linear_work(load, "beta_proj", PART, hidden_size, heads),
        *gates,
        OpWork("conv_qk", PART, causal_conv1d(2 * keys, kernel, size), CONVOLUTION),
        OpWork("conv_v", PART, causal_conv1d(values, kernel, size), CONVOLUTION),
        OpWork("delta_rule", "scan", rule.work(load.seq_length), rule),
        OpWork("gated_norm", PART, gated_norm(values, heads, size), GATED_NORM),
        linear_work(load, "out_proj", PART, values, hidden_size, closes=True),
    )


_MIXED = {"qk_proj", "v_proj", "beta_proj", exchange("conv_qk"), "conv_qk", "split qk", exchange("conv_v"), "conv_v"}
GATED_DELTA = Selective(
    "mix",
    frozenset({*_MIXED, "decay_proj", "gate_proj"}),
    caches={"delta_rule": "gated_delta", "gated_norm": "head_gated_norm"},  # saved, since their backward reads them
)
KDA = GATED_DELTA._replace(reruns=frozenset({*_MIXED, "latent_proj", "split latents", "decay_up", "gate_up"}))


def linear_attention_selective(linear: GatedDeltaNet | KimiDeltaAttention, _variant: None) -> Selective:
    """Operations of a G block that selective recompute runs again."""
    return KDA if linear.has_latents else GATED_DELTA


def linear_attention_program(
    dims: Dims, linear: GatedDeltaNet | KimiDeltaAttention, _variant: None, _operations: None, parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """One G block."""
    heads, key_heads = linear.num_value_heads // dims.tp, linear.num_key_heads // dims.tp
    inside = delta_inside(dims, linear, heads, key_heads, parameters) if dims.kernels else None
    latent, summed = linear.has_latents, sums_separately(dims, parameters)
    program = _program(latent, dims.tp > 1, dims.cp > 1, inside is not None, summed)
    return program, residual(_storages(dims, linear) | inside_storages(dims, inside))


def _storages(dims: Dims, linear: GatedDeltaNet | KimiDeltaAttention) -> Shapes:
    heads, key_heads = linear.num_value_heads // dims.tp, linear.num_key_heads // dims.tp
    keys, values, wide, handed = key_heads * linear.key_dim, heads * linear.value_dim, dims.wide, dims.cp > 1
    shapes = dict.fromkeys(("qk_proj", "qk"), wide(2 * keys))
    shapes |= dict.fromkeys(("q", "k"), wide(keys))
    shapes |= dict.fromkeys(("v_proj", "v", "y", "gate", "gated"), wide(values))
    shapes |= dict.fromkeys(("beta", "decay"), wide(heads))
    if isinstance(linear, KimiDeltaAttention):
        shapes |= {"decay": wide(heads * linear.key_dim)}
    if linear.has_latents:
        shapes |= {"latents": wide(2 * linear.key_dim)}
        shapes |= dict.fromkeys(("decay_latent", "gate_latent"), wide(linear.key_dim))
    rule = delta_sizes(linear, dims.batch, piece_positions(dims), heads, key_heads, dims.dtype.bytes)
    statistics = {"gated_rstd": wide(heads), "states": of_pieces(dims, rule.states)}
    carried: Shapes = {}
    if handed:
        decays = linear.key_dim if isinstance(linear, KimiDeltaAttention) else 1
        statistics["summed"] = (heads * (1 + decays),)  # gradients of A_log and dt_bias
        carried = handed_storages(dims, heads, num_lanes(key_heads, dims.cp), linear.key_dim, linear.value_dim)
        carried |= exchanged_storages(dims, "qk", linear.conv_kernel, 2 * keys)
        carried |= exchanged_storages(dims, "v", linear.conv_kernel, values)
    return carried | mixer_storages(dims, shapes, statistics)


@cache
def _program(latent: bool, sharded: bool, handed: bool, kernels: bool, summed: bool) -> BlockProgram:
    own = (("latent_proj", "latents"),) if latent else (("decay_proj", "decay"), ("gate_proj", "gate"))
    projections = (("qk_proj", "qk_proj"), ("v_proj", "v_proj"), ("beta_proj", "beta"), *own)
    inputs = ("q", "k", "v", "decay", "beta")
    params = ("A_log", "dt_bias")
    ops = (
        *input_ops(*(Projection(name, made, f"{name}.weight") for name, made in projections), sharded=sharded),
        *convolution("conv_qk", "qk_proj", "qk", ("conv_qk.weight",), handed=handed),
        cut("split qk", "qk", ("q", "k")),
        *convolution("conv_v", "v_proj", "v", ("conv_v.weight",), handed=handed),
        *(_latent_ops() if latent else ()),
        scan_op("delta_rule", inputs, "y", ("states",), params, handed=handed, summed=summed, inside=(kernels, kernels)),
        Op("gated_norm", ("y", "gate"), ("gated", "gated_rstd"), keeps=("y", "gate", "gated_rstd"), params=("gated_norm.weight",)),
        *output_ops("gated", sharded=sharded),
    )
    return (KDA if latent else GATED_DELTA).program(*ops)


def _latent_ops() -> tuple[Op, ...]:
    return (
        cut("split latents", "latents", ("decay_latent", "gate_latent")),
        linear("decay_up", "decay_latent", "decay", "decay_up.weight"),
        linear("gate_up", "gate_latent", "gate", "gate_up.weight"),
    )
