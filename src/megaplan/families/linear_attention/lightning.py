"""Lightning attention: a state per head that decays by a constant, without a delta rule (arXiv:2401.04658).

One product of the block's input makes queries, keys and values, interleaved by head, with silu after it; the scan's output has a norm over
all heads and a gate of the same width. It is Mamba-2's scan with steps of one: values are x, keys B, queries C, and a head's constant is
its rate of decay; `megakernels.ssd` runs it, and keeps the state before every chunk.
"""

import math
from collections.abc import Sequence
from functools import cache

from megakernels.facts import KernelScratch
from megakernels.ops.activation.facts import activation
from megakernels.ops.rms_norm.facts import NORM, norm
from megakernels.ops.ssd.facts import Ssd
from megaplan.blocks.costs import gate_work, linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, output_ops
from megaplan.blocks.ops import norm as norm_op
from megaplan.blocks.storages import (
    Shapes,
    handed_storages,
    inside_storages,
    lane_of,
    mixer_storages,
    num_lanes,
    of_pieces,
    piece_positions,
    residual,
    scan_op,
)
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.families.family import Selective
from megaplan.families.linear_attention.section import LightningAttention
from megaplan.inventory.makers import column, per_head, row
from megaplan.inventory.makers import norm as scale
from megaplan.inventory.tensors import Init, ParamTensor

PART, SCAN = "G", "lightning"
LIGHTNING = Selective(
    "mix",
    frozenset({"qkv_proj", "gate_proj", "silu", "split qkv", "decays", "gated_norm", "gate sigmoid"}),
    caches={SCAN: "ssd"},
)
FEEDS = frozenset("DE")
"""Letters of layers that mix no positions."""
SLOWEST = 1e-5
"""Share of the decay that the last layer has."""


def log_decays(num_heads: int, letters: Sequence[str], layer: int) -> tuple[float, float]:
    """The logarithm of a head's decay a position is a line in its number: (first, step), head 0 has `first`.

    Head i of n decays by exp(−2^(−8 (i + 1) / n) · (1 − share)), where share is the layer's position among the mixers, from 0 to 1; a later
    layer has the last one's.

    Source: arXiv:2501.08313, section 2.2.2, and its published code.
    """
    mixing = [index for index, letter in enumerate(letters) if letter not in FEEDS]
    place = min(sum(index < layer for index in mixing), len(mixing) - 1)
    factor = 1 - place / (len(mixing) - 1 + SLOWEST) + SLOWEST
    step = -8 * math.log(2) / num_heads
    return math.log(factor) + step, step


def lightning_tensors(linear: LightningAttention, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Tensors of one block, its pre-norm included."""
    heads, width = linear.num_heads, linear.num_heads * linear.head_dim
    return (
        scale("norm.weight", hidden_size),
        column("qkv_proj.weight", 3 * width, hidden_size, num_matrices=3 * heads),
        column("gate_proj.weight", width, hidden_size, num_matrices=heads),
        per_head("gated_norm.weight", (width,), Init.ONES),
        row("out_proj.weight", hidden_size, width),
    )


def lightning_sizes(linear: LightningAttention, batch: int, positions: int, heads: int, itemsize: int) -> Ssd:
    """Sizes of the scan over these heads, one group per head."""
    return Ssd(batch, positions, heads, heads, linear.head_dim, linear.head_dim, linear.chunk_size, itemsize)


def lightning_inside(dims: Dims, linear: LightningAttention, heads: int) -> KernelScratch | None:
    """Kernel scratch of the scan over these heads of this rank, in bytes; None if the kernels do not support these sizes.

    The kernels make gradients of steps and decays too, which have none: they are dropped.
    """
    run, size = lane_of(dims, heads, heads), dims.dtype.bytes
    sizes = lightning_sizes(linear, dims.batch, run.positions, run.heads, size)
    if not sizes.accepted:
        return None
    constants = 3 * dims.stat_dtype.bytes * run.heads
    of_state = size * dims.batch * run.heads * linear.head_dim**2
    found = run.inside(dims, sizes.forward_bytes(), sizes.backward_bytes(constants), sizes.states[1], of_state)
    dropped = constants + size * dims.batch * dims.tokens * heads if dims.cp == 1 else 0
    return found._replace(backward=found.backward + dropped)


def lightning_program(dims: Dims, linear: LightningAttention) -> tuple[BlockProgram, Shapes]:
    """One block; the state before every chunk is kept."""
    heads = linear.num_heads // dims.tp
    width, wide = heads * linear.head_dim, dims.wide
    states = lightning_sizes(linear, dims.batch, piece_positions(dims), heads, dims.dtype.bytes).states
    shapes = dict.fromkeys(("qkv", "qkv_active"), wide(3 * width))
    shapes |= dict.fromkeys(("q", "k", "v", "y", "y_normed", "gate", "gate_sigmoid", "gated"), wide(width))
    shapes |= {"states": of_pieces(dims, states), "step": (1,), "steps_gradient": wide(heads)}
    statistics = {"y_rstd": wide(), "decays": (heads,), "zeros": (heads,)}
    handed = handed_storages(dims, heads, num_lanes(heads, dims.cp), linear.head_dim, linear.head_dim) if dims.cp > 1 else {}
    inside = lightning_inside(dims, linear, heads) if dims.kernels else None
    program = _program(dims.tp > 1, dims.cp > 1, inside is not None)
    return program, residual(mixer_storages(dims, shapes, statistics) | handed | inside_storages(dims, inside))


@cache
def _program(sharded: bool, handed: bool, kernels: bool) -> BlockProgram:
    projections = Projection("qkv_proj", "qkv", "qkv_proj.weight"), Projection("gate_proj", "gate", "gate_proj.weight")
    inputs, constants = ("q", "k", "v"), ("decays", "zeros", "step")
    fetches = ("steps_gradient",) if handed else ()
    scan = scan_op(
        SCAN, (*inputs, *constants), "y", ("states",), (), handed=handed, summed=False, inside=(kernels, kernels), fetches=fetches
    )
    return LIGHTNING.program(
        *input_ops(*projections, sharded=sharded),
        Op("silu", ("qkv",), ("qkv_active",), keeps=("qkv",)),
        cut("split qkv", "qkv_active", inputs),
        Op("decays", (), constants),
        scan._replace(grads=inputs),
        norm_op("gated_norm", "y", "y_normed", "y_rstd", "gated_norm.weight"),
        Op("gate sigmoid", ("gate",), ("gate_sigmoid",), keeps=("gate_sigmoid",)),
        Op("gate", ("y_normed", "gate_sigmoid"), ("gated",), keeps=("y_normed", "gate_sigmoid")),
        *output_ops("gated", sharded=sharded),
    )


def lightning_work(load: Workload, linear: LightningAttention, hidden_size: int) -> Works:
    """Work of one block, pre-norm and residual included."""
    heads = linear.num_heads // load.tp
    width, scan = heads * linear.head_dim, lightning_sizes(linear, load.sequences, load.positions, heads, load.itemsize)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "qkv_proj", PART, hidden_size, 3 * width),
        linear_work(load, "gate_proj", PART, hidden_size, width),
        OpWork("silu", PART, activation(3 * width, load.itemsize, gated=False)),
        OpWork(SCAN, "scan", scan.work(load.seq_length), scan),
        OpWork("gated_norm", PART, norm(width, load.itemsize), NORM),
        gate_work(load, PART, width, counts=("gate sigmoid", "gate")),
        linear_work(load, "out_proj", PART, width, hidden_size, closes=True),
    )
