"""Lightning attention: a state per head that decays by a constant, without a delta rule (arXiv:2401.04658).

One product of the block's input makes queries, keys and values, with silu behind it; what the heads read of their states has a norm over
all heads and a gate as wide.
"""

from __future__ import annotations

from functools import cache

from megakernels.facts import Work
from megakernels.ops.activation.facts import activation
from megakernels.ops.rms_norm.facts import NORM, norm
from megaplan.blocks.costs import gate_work, linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, Op, Projection, cut, input_ops, output_ops
from megaplan.blocks.ops import norm as norm_op
from megaplan.blocks.storages import Shapes, mixer_storages, residual
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.families.family import Selective
from megaplan.families.linear_attention.section import LightningAttention
from megaplan.inventory.makers import column, per_head, row
from megaplan.inventory.makers import norm as scale
from megaplan.inventory.tensors import Init, ParamTensor

PART, SCAN = "G", "lightning"
LIGHTNING = Selective("mix", frozenset({"silu", "split qkv", "gate sigmoid"}))


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


def lightning_program(dims: Dims, linear: LightningAttention) -> tuple[BlockProgram, Shapes]:
    """One block; the state before every chunk is kept."""
    heads = linear.num_heads // dims.tp
    width, chunks = heads * linear.head_dim, -(-dims.tokens // linear.chunk_size)
    shapes = dict.fromkeys(("qkv", "qkv_active"), dims.wide(3 * width))
    shapes |= dict.fromkeys(("q", "k", "v", "y", "y_normed", "gate", "gate_sigmoid", "gated"), dims.wide(width))
    statistics = {"y_rstd": dims.wide(), "states": (dims.batch, chunks, heads, linear.head_dim, linear.head_dim)}
    return _program(dims.tp > 1), residual(mixer_storages(dims, shapes, statistics))


@cache
def _program(sharded: bool) -> BlockProgram:
    projections = Projection("qkv_proj", "qkv", "qkv_proj.weight"), Projection("gate_proj", "gate", "gate_proj.weight")
    inputs = "q", "k", "v"
    return LIGHTNING.program(
        *input_ops(*projections, sharded=sharded),
        Op("silu", ("qkv",), ("qkv_active",), keeps=("qkv",)),
        cut("split qkv", "qkv_active", inputs),
        Op(SCAN, inputs, ("y", "states"), keeps=(*inputs, "states")),
        norm_op("gated_norm", "y", "y_normed", "y_rstd", "gated_norm.weight"),
        Op("gate sigmoid", ("gate",), ("gate_sigmoid",), keeps=("gate_sigmoid",)),
        Op("gate", ("y_normed", "gate_sigmoid"), ("gated",), keeps=("y_normed", "gate_sigmoid")),
        *output_ops("gated", sharded=sharded),
    )


def lightning_work(load: Workload, linear: LightningAttention, hidden_size: int) -> Works:
    """Work of one block, pre-norm and residual included."""
    heads, dim = linear.num_heads // load.tp, linear.head_dim
    width, chunk = heads * dim, min(linear.chunk_size, load.seq_length)
    flops, moved = heads * (4 * chunk * dim + 4 * dim * dim), 4 * width * load.itemsize
    scan = Work(forward=flops, input_grad=2 * flops, moved_forward=moved, moved_input=2 * moved)
    return (
        residual_work(load, PART, hidden_size),
        linear_work(load, "qkv_proj", PART, hidden_size, 3 * width),
        linear_work(load, "gate_proj", PART, hidden_size, width),
        OpWork("silu", PART, activation(3 * width, load.itemsize, gated=False)),
        OpWork(SCAN, "scan", scan),
        OpWork("gated_norm", PART, norm(width, load.itemsize), NORM),
        gate_work(load, PART, width, counts=("gate sigmoid", "gate")),
        linear_work(load, "out_proj", PART, width, hidden_size, closes=True),
    )
