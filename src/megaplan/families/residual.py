"""The residual path of a block: the kind and the place of the norm between stream and block.

A family defines tensors, program and work of a block that reads an RMSNorm of the stream and adds its result. For another norm, or
another place, these functions derive the block's from the family's: the norm is the first tensor, its operation is `norm`, and the
addition is `residual`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from megakernels.facts import SUMS_BYTES, Work
from megakernels.ops.activation.facts import activation
from megakernels.ops.rms_norm.facts import norm as norm_work
from megaplan.blocks.costs import linear_work
from megaplan.blocks.ops import INPUT, OUTPUT, SHARED, BlockProgram, Dims, Op, linear, plain_norm, reshape
from megaplan.blocks.storages import Shapes, storages
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.attention_residuals import (
    ATTEND,
    CAST_IN,
    CAST_INPUT,
    CAST_OUT,
    CAST_OUTPUT,
    CAST_RESULT,
    SCALE_OUTPUT,
    DepthReads,
    attending,
    cast_attending,
    depth_shapes,
    depth_tensors,
    depth_works,
)
from megaplan.families.layer_embeddings import ADDED, PREFIX, layer_ops, layer_shapes, layer_tensors, layer_works
from megaplan.families.streams import Streams, block_tensors, connected, stream_shapes, stream_works
from megaplan.inventory.makers import norm, replicated
from megaplan.inventory.tensors import Block, Group, Init, ParamTensor

NormKind = Literal["rmsnorm", "layernorm", "layernorm_no_bias"]
StreamNorm = Literal["rmsnorm", "rmsnorm_no_scale", "layernorm", "layernorm_no_bias"]
NormPlacement = Literal["pre", "post", "both"]
NORMED = "normed"
POST_NORM = "post_norm"
SCALE = "stream_scale.weight"
PASS_ON = "pass on"
"""Last operation of a block whose norm the next block reads; it represents that block."""
ReturnedGradient = Literal["whole", "view"]


class SharedNorm(NamedTuple):
    """Use of a norm that belongs to another block.

    Attributes:
        gradient: Form in which the block returns the gradient: whole, or as a view of a product.
        keeps: True if the block keeps the norm for backward.
        waits: True if its W needs the norm under a split backward.
    """

    gradient: ReturnedGradient
    keeps: bool
    waits: bool = False


CENTERED = frozenset({"norm", "post_norm", "final_norm", "q_norm", "k_norm", "hidden_norm", "embedding_norm", "output_norm"})
"""The norms of `model.zero_centered_norm`: of the residual stream, and of query and key heads."""


class ResidualPath(NamedTuple):
    """A block's way from the residual stream and back.

    Attributes:
        norm: rmsnorm, rmsnorm_no_scale, layernorm, or layernorm_no_bias.
        placement: Place of the norm: before the block (pre), on its output (post), both, or none.
        plain_is_none: True if a block without a norm before it reads the stream instead of another block's normed input.
        shares_input: The block reads the normed input of the block before it.
        holds_shared: No block keeps that input for backward: it exists while the block's forward runs, whose caller names it.
        shared_dtype: Dtype of that input, if it is not the block's, which then casts it.
        passes_on: Use of the norm by the next block; None if that block does not read it.
        scaled: The block's output is multiplied by a constant.
        streams: Hyper-connections; None for one stream.
        gate_rank: Width inside the gate of the norm before the block; None for no gate.
        embedding_dim: Width of an embedding of the layer, which is added after the block's own result; None for none.
        scales_stream: Each channel of the stream has a learned factor before the block adds to it.
        depth: Values that the block reads under attention residuals; None with a residual stream.
    """

    norm: StreamNorm = "rmsnorm"
    placement: NormPlacement | Literal["none"] = "pre"
    plain_is_none: bool = False
    shares_input: bool = False
    holds_shared: bool = False
    shared_dtype: DType | None = None
    passes_on: SharedNorm | None = None
    scaled: bool = False
    streams: Streams | None = None
    gate_rank: int | None = None
    embedding_dim: int | None = None
    scales_stream: bool = False
    depth: DepthReads | None = None


PLAIN = ResidualPath()
UNNORMED = ("post", "none")
"""Placements without a norm before the block."""


def norm_tensors(kind: StreamNorm, width: int, prefix: str = "norm.") -> tuple[ParamTensor, ...]:
    """Scale of a norm, if any, and bias of a LayerNorm."""
    if kind == "rmsnorm_no_scale":
        return ()
    scale = norm(f"{prefix}weight", width)
    if kind != "layernorm":
        return (scale,)
    return scale, replicated(f"{prefix}bias", (width,), Group.OTHER, Init.ZEROS)


def tensors_of(path: ResidualPath, tensors: tuple[ParamTensor, ...], hidden_size: int) -> tuple[ParamTensor, ...]:
    """A block's tensors, from its family's, whose first is the scale of an RMSNorm before the block."""
    if path == PLAIN:
        return tensors
    before = () if path.shares_input or path.placement in UNNORMED else norm_tensors(path.norm, hidden_size)
    after = () if path.placement in ("pre", "none") else norm_tensors(path.norm, hidden_size, "post_norm.")
    connections = () if path.streams is None else block_tensors(path.streams, hidden_size)
    gate = () if path.gate_rank is None else _gate_tensors(path.gate_rank, hidden_size)
    factors = (norm(SCALE, hidden_size),) if path.scales_stream else ()
    embedding = () if path.embedding_dim is None else layer_tensors(path.embedding_dim, hidden_size)
    depth = () if path.depth is None else depth_tensors(hidden_size)
    return (*before, *gate, *tensors[1:], *after, *factors, *embedding, *connections, *depth)


def _gate_tensors(rank: int, hidden_size: int) -> tuple[ParamTensor, ...]:
    return (
        replicated("norm_gate.down.weight", (rank, hidden_size), Group.MATRIX),
        replicated("norm_gate.up.weight", (hidden_size, rank), Group.MATRIX),
    )


def path_in(path: ResidualPath, block: Block) -> ResidualPath:
    """Residual path of one block of a model, from its tensors: a block without a norm before it shares its input or has a norm after it."""
    tensors = block.tensors
    path = path if block.reads is None else path._replace(depth=block.reads)
    width = [tensor.shape[0] for tensor in tensors if tensor.name == f"{PREFIX}.gate.weight"]
    path = path._replace(embedding_dim=width[0]) if width else path
    if path.norm == "rmsnorm_no_scale":  # all blocks have norms at the model's places
        return path
    gate = [tensor.shape[0] for tensor in tensors if tensor.name == "norm_gate.down.weight"]
    path = path._replace(gate_rank=gate[0]) if gate else path
    if path.placement == "pre" and f"{POST_NORM}.weight" in [tensor.name for tensor in tensors]:
        return path._replace(placement="both" if tensors[0].name == "norm.weight" else "post")
    if path.placement == "post" or tensors[0].name == "norm.weight":
        return path
    return path._replace(placement="none") if path.plain_is_none else path._replace(shares_input=True)


@cache
def program_of(path: ResidualPath, program: BlockProgram) -> BlockProgram:
    """A block's program, made from its family's program."""
    if path == PLAIN:
        return program
    ops: list[Op] = []
    for op in program.ops:
        if op.name == "norm":
            ops += _before(path, op)
            ops = ops if path.gate_rank is None else [*ops[:-1], *_gated_norm(ops[-1])]
        elif op.name == "residual" and path.placement in ("post", "both"):
            stream, made = op.reads
            ops += [norm_op(POST_NORM, path.norm, made, "post_normed", prefix="post_"), op._replace(reads=(stream, "post_normed"))]
        else:
            ops.append(op.renamed({NORMED: INPUT}) if path.placement in UNNORMED else op)
    ops = [*_with_factors(path, ops)]
    if path.embedding_dim is not None:
        added = tuple([ADDED if name == OUTPUT else name for name in ops[-1].makes])
        ops = [*ops[:-1], ops[-1]._replace(makes=added), *layer_ops()]
    held = program.held - {NORMED} if path.placement in UNNORMED else program.held
    if path.passes_on is not None:
        passed = NORMED if path.shared_dtype is None else VIEWED
        keeps = (passed,) if path.passes_on.keeps else ()
        views, waits = path.passes_on.gradient == "view", path.passes_on.waits
        ops.append(Op(PASS_ON, (passed,), (), keeps=keeps, hands_views=views, waits=waits))
        held |= {passed}
    after = program.after if path.placement in ("pre", "none") else program.after | {POST_NORM}
    plain = BlockProgram(tuple(ops), held, program.reruns, program.caches, after)
    if path.depth is not None:
        return attending(plain, path.depth)
    return plain if path.streams is None else connected(plain)


VIEWED = "viewed_normed"
"""The shared normed stream in a block that casts it."""


@cache
def cast_program(program: BlockProgram) -> BlockProgram:
    """A program between two casts: of the residual stream, or of a sum of values, and of the result; casts save nothing."""
    if program.ops[0].name == ATTEND:
        return cast_attending(program)
    ops = [op.renamed({INPUT: CAST_INPUT, OUTPUT: CAST_OUTPUT}) for op in program.ops]
    casts = Op(CAST_IN, (INPUT,), (CAST_INPUT,)), Op(CAST_OUT, (CAST_OUTPUT,), (OUTPUT,))
    passing = [ops.pop()] if ops[-1].name == PASS_ON else []
    return replace(program, ops=(casts[0], *ops, casts[1], *passing))


def cast_shapes(path: ResidualPath, shapes: Shapes, dims: Dims) -> Shapes:
    """The storages of a block between casts from and to a stream with the dtype of `dims`."""
    ends = storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys((INPUT, OUTPUT, CAST_RESULT), shapes[OUTPUT][2]))
    values = {} if path.depth is None else depth_shapes(path.depth, dims)
    return shapes | {CAST_INPUT: shapes[OUTPUT], CAST_OUTPUT: shapes[OUTPUT]} | ends | values


def shared_by(program: BlockProgram, policy: str) -> SharedNorm:
    """Use of a shared norm by a block with this program.

    The block returns a view if one linear alone reads the norm; recompute (`policy`) keeps its inputs, even if no operation does.
    """
    readers = [op for op in program.ops if NORMED in (op.reads if op.grads is None else op.grads)]
    again = any(NORMED in op.reads and (policy == "full" or op.name in program.reruns) for op in program.ops) and policy != "none"
    keeps = again or any(NORMED in op.keeps for op in program.ops)
    waits = any(NORMED in op.late_keeps for op in program.ops)
    return SharedNorm("view" if len(readers) == 1 and readers[0].hands_views else "whole", keeps, waits)


def _scaled(add: Op) -> tuple[Op, ...]:
    """An addition with a factor: its forward makes no product, its backward makes the gradient of the summand."""
    stream, made = add.reads
    return Op(SCALE_OUTPUT, (made,), ("scaled_output",)), add._replace(reads=(stream, "scaled_output"), holds=(made,))


def _with_factors(path: ResidualPath, ops: Iterable[Op]) -> Iterator[Op]:
    """Operations with the factors of the stream and of the block's output; a sum over several streams includes the latter."""
    for op in ops:
        added = _scaled(op) if op.name == "residual" and path.scaled and path.streams is None else (op,)
        yield from added[:-1]
        yield from _on_scaled_stream(added[-1]) if op.name == "residual" and path.scales_stream else added[-1:]


def _on_scaled_stream(add: Op) -> tuple[Op, ...]:
    """An addition to a stream whose channels have factors."""
    stream, made = add.reads
    scaled = Op("scale stream", (stream,), ("scaled_stream",), keeps=(stream,), params=(SCALE,))
    return scaled, add._replace(reads=("scaled_stream", made))


def _gated_norm(normed: Op) -> tuple[Op, ...]:
    """A norm whose result is multiplied by a gate: the sigmoid of two narrow products of the result itself."""
    keeps = "norm_ungated", "norm_gate_sigmoid"
    return (
        normed._replace(makes=tuple("norm_ungated" if name == NORMED else name for name in normed.makes)),
        linear("norm_gate.down", "norm_ungated", "norm_gate_low", "norm_gate.down.weight"),
        Op("norm gate silu", ("norm_gate_low",), ("norm_gate_silu",), keeps=("norm_gate_low",)),
        linear("norm_gate.up", "norm_gate_silu", "norm_gate_wide", "norm_gate.up.weight"),
        Op("norm gate sigmoid", ("norm_gate_wide",), ("norm_gate_sigmoid",), keeps=("norm_gate_sigmoid",)),
        Op("norm gate", keeps, (NORMED,), keeps=keeps),
    )


def shapes_of(path: ResidualPath, shapes: Shapes, dims: Dims) -> Shapes:
    """A block's storages, made from its family's storages. A shared normed input belongs to the block that made it."""
    if path == PLAIN:
        return shapes
    own = dims.residual[:2]
    shapes = shapes if path.streams is None else shapes | stream_shapes(path.streams, dims)
    shapes = shapes if path.depth is None else shapes | depth_shapes(path.depth, dims)
    found = shapes | storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys(("mean", "post_mean", "post_rstd"), own))
    ones = dict.fromkeys(("ones", "post_ones"), (dims.hidden,))
    found |= storages(dims.dtype, Column.ACTIVATIONS, {"post_normed": dims.residual, "scaled_output": (0,), **ones})
    found |= {} if path.embedding_dim is None else layer_shapes(dims, path.embedding_dim)
    wide = dict.fromkeys(("norm_ungated", "norm_gate_wide", "norm_gate_sigmoid", "scaled_stream"), dims.residual)
    narrow = dict.fromkeys(("norm_gate_low", "norm_gate_silu"), (*own, path.gate_rank or 0))
    found |= storages(dims.dtype, Column.ACTIVATIONS, {**wide, **narrow})
    if path.shares_input:
        shared = {SHARED: dims.residual if path.holds_shared else (0,), VIEWED: dims.residual}
        found |= storages(path.shared_dtype or dims.dtype, Column.ACTIVATIONS, shared)
    return found


def work_of(path: ResidualPath, load: Workload, ops: Works, hidden_size: int) -> Works:
    """A block's work from its family's, whose first operation is the addition of the block before with the norm."""
    if path == PLAIN:
        return ops
    more = norm_works(path.norm, load, hidden_size) if path.placement == "both" else ()
    if path.norm.startswith("layernorm"):
        statistic = Work(moved_forward=SUMS_BYTES, moved_input=SUMS_BYTES)
        ops = (ops[0]._replace(work=ops[0].work + statistic), *ops[1:])
    connections = () if path.streams is None else stream_works(path.streams, hidden_size, load.itemsize)
    if path.depth is not None:
        connections = depth_works(path.depth, hidden_size, load.itemsize)
    return (*ops, *more, *connections, *_narrow_works(path, load, hidden_size))


def _narrow_works(path: ResidualPath, load: Workload, hidden_size: int) -> Works:
    """A norm's gate, and factors of the stream's channels, on the rank's own tokens."""
    found: Works = ()
    if path.gate_rank is not None:
        found = (
            linear_work(load, "norm_gate.down", "head", hidden_size, path.gate_rank, own_tokens=True),
            linear_work(load, "norm_gate.up", "head", path.gate_rank, hidden_size, own_tokens=True),
            OpWork("norm gate", "head", activation(hidden_size, load.itemsize, gated=True), own_tokens=True),
        )
    if path.embedding_dim is not None:
        found += layer_works(load, path.embedding_dim, hidden_size)
    if path.scales_stream:
        row = hidden_size * load.itemsize
        found += (OpWork("scale stream", "head", Work(moved_forward=2 * row, moved_input=3 * row), own_tokens=True),)
    return found


def norm_works(kind: StreamNorm, load: Workload, hidden_size: int, name: str = "post_norm") -> Works:
    """A separate norm of the rank's own tokens."""
    statistic = Work(moved_forward=SUMS_BYTES, moved_input=SUMS_BYTES) if kind.startswith("layernorm") else Work()
    return (OpWork(name, "head", norm_work(hidden_size, load.itemsize) + statistic, own_tokens=True),)


def norm_op(name: str, kind: StreamNorm, reads: str, makes: str, *, prefix: str = "", params: tuple[str, str] | None = None) -> Op:
    """RMSNorm keeps its input and the inverse deviation; LayerNorm also keeps the mean, as `torch.native_layer_norm` does.

    A norm without a scale makes a tensor of ones for it.
    """
    if kind == "rmsnorm_no_scale":
        return plain_norm(name, reads, makes, prefix)
    scale, shift = params or (f"{name}.weight", f"{name}.bias")
    statistics = (f"{prefix}rstd",) if kind == "rmsnorm" else (f"{prefix}mean", f"{prefix}rstd")
    given = (scale, shift) if kind == "layernorm" else (scale,)
    return Op(name, (reads,), (makes, *statistics), keeps=(reads, *statistics), params=given)


def _before(path: ResidualPath, op: Op) -> tuple[Op, ...]:
    if path.placement in UNNORMED:
        return ()
    if path.shared_dtype is not None:
        return reshape("shared norm", SHARED, VIEWED), Op("cast norm", (VIEWED,), (NORMED,))
    if path.shares_input:
        return (reshape("shared norm", SHARED, NORMED),)
    return (norm_op("norm", path.norm, INPUT, NORMED),) if path.norm != "rmsnorm" else (op,)
