"""A stated encoder and its projection on the first stage: sizes, and the operations of each block.

Images are the rows of the encoder's batch, so that attention inside an image needs no mask. A frozen part with no trained part before it
runs without a graph: it saves nothing, and has no backward. The stage replaces the embedded placeholders of the text stream by the
projection's rows; this belongs to the embedding's operations.

Source: `megarun.model.vision`.
"""

from functools import cache
from typing import NamedTuple

from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Flow, Op, linear, reshape
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.residual import ResidualPath, norm_op, program_of, shapes_of
from megaplan.hosts.megarun.adapters import adapted_op, frozen_part
from megaplan.hosts.megarun.parts import BlockReplay, replay_of
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.inventory.towers import FIRST_NORM, LAST_NORM, PATCHES, PROJECTOR, block_of
from megaplan.spec.models import Spec
from megaplan.spec.towers import Encoder, Projection

FP64_BYTES = 8
"""Bytes of an fp64 value: the dtype in which angles are computed, and of the sums of a step; no key of a spec states it."""
NOTHING = "nothing"
"""Source of the gradient of a part without a backward."""


class TowerSizes(NamedTuple):
    """Sizes of a stated encoder, per microbatch.

    Attributes:
        encoder: The encoder.
        projection: The projection of its features.
        images: Images.
        tokens: Tokens of the text stream per image.
        tp: Ranks that share its heads, widths and patches.
    """

    encoder: Encoder
    projection: Projection
    images: int
    tokens: int
    tp: int

    @property
    def rows(self) -> int:
        """Rows of the projection's output."""
        return self.images * self.tokens

    @property
    def own_patches(self) -> int:
        """Patches of an image that a rank embeds and projects."""
        return self.encoder.patches // self.tp

    def dims(self, whole: Dims) -> Dims:
        """Local sizes of the encoder's blocks; `whole` are the spec's."""
        found = whole._replace(batch=self.images, tokens=self.encoder.patches, residual_tokens=self.own_patches)
        found = found._replace(hidden=self.encoder.hidden_size, tp=self.tp, cp=1, ep=1, etp=1)
        return found._replace(packed=False, is_last_cp_rank=True, kernels=False, frozen=False, relations=0, flash4=False)


def tower_sizes(spec: Spec) -> TowerSizes | None:
    """Sizes of the spec's stated encoder; None without one."""
    stated = None if spec.model.towers is None else spec.model.towers.stated
    if stated is None:
        return None
    encoder, projection = stated
    images, tokens = spec.batch.micro_batch_size * spec.batch.images, encoder.patches // projection.patches_per_token
    return TowerSizes(encoder, projection, images, tokens, spec.mesh.tower_tp)


def tower_input_bytes(spec: Spec) -> int:
    """Values of the patches of a microbatch, and the places of their tokens in the stream of text, int64; 0 without a stated encoder."""
    sizes = tower_sizes(spec)
    if sizes is None:
        return 0
    values = sizes.images * sizes.own_patches * sizes.encoder.patch_values * spec.precision.activations.bytes
    return values + sizes.rows * DType.INT64.bytes


class RotaryTable(NamedTuple):
    """Cos and sin of a rotary embedding.

    Attributes:
        num_bytes: Both, fp32.
        scratch_bytes: Angles, sines and frequencies in fp64, which exist while the table is computed.
    """

    num_bytes: int
    scratch_bytes: int


def tower_rotary_tables(spec: Spec) -> tuple[RotaryTable, ...]:
    """The rotary table for the places of an image's patches [P, D / 2]; rows and columns each use half of its frequencies.

    None without rotary embedding.
    """
    sizes = tower_sizes(spec)
    if sizes is None or not sizes.encoder.rotary:
        return ()
    pairs = sizes.encoder.head_dim // 2
    angles = sizes.encoder.patches * pairs
    return (RotaryTable(2 * angles * DType.FP32.bytes, (2 * angles + pairs // 2) * FP64_BYTES),)


def stream_bytes(spec: Spec, dims: Dims, name: str) -> int:
    """Bytes of a block's input: the encoder's stream, the projection's rows (embedding), all streams of text, or one stream (head)."""
    sizes = tower_sizes(spec)
    if sizes is not None and name == "embedding":
        return sizes.rows * dims.hidden * dims.dtype.bytes
    if sizes is not None and name.partition(".")[0] in ("vision", PROJECTOR):
        dims = sizes.dims(dims)
    batch, tokens, hidden = dims.residual if name == "head" else dims.boundary
    return batch * tokens * hidden * dims.dtype.bytes


class Trained(NamedTuple):
    """The parts of a spec's towers that have gradients of their parameters."""

    vision: bool
    projector: bool


def trained_parts(spec: Spec) -> Trained:
    """The trained parts; none with `lora`."""
    towers = spec.model.towers
    if towers is None or spec.lora is not None:
        return Trained(vision=False, projector=False)
    return Trained(towers.trains("vision"), towers.trains(PROJECTOR))


def tower_part(spec: Spec, sizes: TowerSizes, whole: Dims, name: str, parameters: DType) -> BlockReplay:
    """The replay of a block of the towers.

    Args:
        spec: The spec.
        sizes: Sizes of its encoder.
        whole: Local sizes of the spec.
        name: Name of the block.
        parameters: Dtype of the parameters' gradients.
    """
    dims, trained, encoder = sizes.dims(whole), trained_parts(spec), sizes.encoder
    if name == PROJECTOR:
        part = _projector(sizes, dims, whole.hidden)
        if trained.vision:
            return part if trained.projector else frozen_part(part, embeds=False)
        return _without_input(part) if trained.projector else _detached(part)
    block = block_of(encoder, name)
    if block is not None:
        program, tensors = block.family.program(dims, block.section, block.variant, block.operations, parameters)
        path = ResidualPath(encoder.norm)
        policy = spec.recompute.towers if trained.vision else "none"
        part = BlockReplay(replay_of(program_of(path, program), policy), shapes_of(path, tensors, dims))
    elif name in (FIRST_NORM, LAST_NORM):
        ops = (norm_op("norm", encoder.norm, INPUT, OUTPUT, params=("weight", "bias")),)
        part = BlockReplay(_replayed(ops), residual(_statistics(dims, dims.residual[:2]) | _rows(dims, {OUTPUT: dims.residual})))
    else:
        assert name == PATCHES
        part = _patches(encoder, dims)
    return part if trained.vision else _detached(part)


@cache
def _replayed(ops: tuple[Op, ...]) -> Replay:
    return replay(ops)


def _rows(dims: Dims, shapes: dict[str, tuple[int, ...]]) -> Shapes:
    return storages(dims.dtype, Column.ACTIVATIONS, shapes)


def _statistics(dims: Dims, rows: tuple[int, ...]) -> Shapes:
    return storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys(("mean", "rstd"), rows))


def _patches(encoder: Encoder, dims: Dims) -> BlockReplay:
    """The linear of the patches, and the addition of their positions: a view of the first rows (or all) of a table."""
    made = OUTPUT if encoder.positions is None else "projected"
    ops: tuple[Op, ...] = (linear("proj", INPUT, made, "proj.weight", bias="proj.bias" if encoder.patch_bias else None)._replace(grads=()),)
    if encoder.positions is not None:
        ops += (
            Op("positions", (), ("places",), params=("positions",), grads=()),
            Op("add positions", (made, "places"), (OUTPUT,), flow=Flow.ADD),
        )
    shapes = _rows(dims, {OUTPUT: dims.residual, "projected": dims.residual, "places": (0,)})
    return BlockReplay(_replayed(ops), residual(shapes) | _rows(dims, {INPUT: (*dims.residual[:2], encoder.patch_values)}))


def _projector(sizes: TowerSizes, dims: Dims, hidden: int) -> BlockReplay:
    """Operations that average, norm, join and project features; if ranks share patches, their rows are gathered."""
    projection, rows = sizes.projection, sizes.rows // sizes.tp
    pooled = (dims.batch, dims.residual_tokens // projection.pooled_patches)
    shapes: dict[str, tuple[int, ...]] = {"pooled": (*pooled, dims.hidden), "normed": (*pooled, dims.hidden)}
    statistics = (rows,) if projection.norms_joined else pooled
    read = INPUT
    ops: list[Op] = []
    if projection.pooled_patches > 1:
        ops.append(Op("pool", (read,), ("pooled",)))
        read = "pooled"
    join = reshape("join", read, "joined")
    if projection.norms_joined and projection.joined_patches > 1:
        ops, read = [*ops, join], "joined"
    if projection.norm is not None:
        ops.append(norm_op("norm", projection.norm, read, "normed"))
        read = "normed"
    if not projection.norms_joined and projection.joined_patches > 1:
        ops, read = [*ops, reshape("join", read, "joined")], "joined"
    last, end = len(projection.widths) - 2, OUTPUT if sizes.tp == 1 else "own"
    for index, width in enumerate(projection.widths[1:]):
        made = end if index == last else f"wide.{index}"
        bias = f"linears.{index}.bias" if projection.bias else None
        ops.append(linear(f"linears.{index}", read, made, f"linears.{index}.weight", bias=bias))
        read = f"bent.{index}"
        if index < last:
            ops.append(Op(f"gelu.{index}", (made,), (read,), keeps=(made,)))
            shapes |= {made: (rows, width), read: (rows, width)}
    if sizes.tp > 1:
        ops.append(Op("gather", (end,), (OUTPUT,)))
    joined = (rows, projection.widths[0])  # a view, whose gradient is a storage
    shapes |= {"joined": joined, end: (rows, hidden), INPUT: dims.residual}
    return BlockReplay(_replayed(tuple(ops)), made_rows(sizes, dims, hidden, OUTPUT) | _rows(dims, shapes) | _statistics(dims, statistics))


def made_rows(sizes: TowerSizes, dims: Dims, hidden: int, name: str) -> Shapes:
    """The projection's rows of all images: a storage of this name, which ranks that share the patches have gathered."""
    return storages(dims.dtype, Column.ACTIVATIONS if sizes.tp == 1 else Column.COMMUNICATION, {name: (sizes.rows, hidden)})


def _detached(part: BlockReplay) -> BlockReplay:
    """A part without a graph."""
    return BlockReplay(_forward_alone(part.replay), part.tensors | storages(DType.FP32, Column.ACTIVATIONS, {NOTHING: (0,)}))


@cache
def _forward_alone(run: Replay) -> Replay:
    ops = tuple(_unreached(adapted_op(op, frozenset()))._replace(keeps=(), fetches=()) for op in run.program.graph.ops)
    return replay(ops, run.program.graph.held, arrives=NOTHING)


def _unreached(op: Op) -> Op:
    return op._replace(grads=(), flow=Flow.VIEW if op.is_view else Flow.COMPUTE)


def _without_input(part: BlockReplay) -> BlockReplay:
    """A part with gradients only of its parameters."""
    return BlockReplay(_from_parameters(part.replay), part.tensors)


@cache
def _from_parameters(run: Replay) -> Replay:
    found, reached = list[Op](), set[str]()
    for op in run.program.graph.ops:
        own = tuple(name for name in op.reads if name in reached)
        if op.params or own:
            reached |= set(op.makes)
            found.append(op._replace(grads=own))
        else:
            found.append(_unreached(op)._replace(keeps=()))
    return replay(tuple(found))


def merged_part(spec: Spec, sizes: TowerSizes, dims: Dims, part: BlockReplay) -> BlockReplay:
    """The embedding's part: it writes the projection's rows to the positions of placeholder tokens in the stream.

    The stream with these rows is a new storage. Backward makes two gradients: the stream's, with zeros at these positions, and the rows'.
    If a rank has only some of the positions, the merged stream and its gradient have one additional position, to which the other rows are
    written.
    """
    batch, tokens, hidden = dims.residual
    shapes = {UNMERGED: dims.residual, JOINED: (batch * tokens + 1, hidden)}
    tensors = part.tensors | storages(dims.dtype, Column.ACTIVATIONS, shapes) | made_rows(sizes, dims, hidden, INPUT)
    return BlockReplay(_merged(part.replay, any(trained_parts(spec)), spec.mesh.cuts_streams), tensors)


UNMERGED, JOINED = "unmerged", "joined"


@cache
def _merged(run: Replay, reached: bool, joins: bool) -> Replay:
    ops = [
        op._replace(
            reads=tuple(name for name in op.reads if name != INPUT), makes=tuple(UNMERGED if name == OUTPUT else name for name in op.makes)
        )
        for op in run.program.graph.ops
    ]
    read = JOINED if joins else UNMERGED
    if joins:
        ops.append(Op("join", (UNMERGED,), (JOINED,), flow=Flow.ADD))  # its gradient is a view of the stream's gradient
    return replay((*ops, Op("merge", (read, INPUT), (OUTPUT,), grads=(read, INPUT) if reached else (read,), holds=(UNMERGED,))))
