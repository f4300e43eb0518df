"""Saved tensors of both ends of the stack except the head: inputs, token embedding, side embeddings, final norm.

Token ids and labels are inputs of the step, priced whole in `buffers.py`.
"""

from functools import cache

from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op, add, linear
from megaplan.blocks.payload import pack_op, unpack_op
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families import layer_embeddings
from megaplan.families.attention_residuals import DepthReads, attend_op, depth_shapes
from megaplan.families.layer_embeddings import LayerEmbeddings
from megaplan.families.registry import families_of
from megaplan.families.residual import StreamNorm, norm_op
from megaplan.families.streams import COLLAPSED, collapse_ops, stream_shapes
from megaplan.hosts.megarun.parts import BlockReplay
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.hosts.megarun.towers import FP64_BYTES, RotaryTable, tower_input_bytes
from megaplan.inventory.tensors import Outside
from megaplan.spec.local import Boundary
from megaplan.spec.models import Features, HeadLayer, LatentAttention, Model, Ngram, Spec
from megaplan.spec.pattern import depth_families
from megaplan.spec.step_graphs import NUMBERS, replays_graphs, replays_update


def boundary_bytes(dims: Dims) -> int:
    """One microbatch's residual stream on a rank: a receive buffer, a stage's output, or the gradient that is being sent.

    torch allocates one receive buffer per microbatch when the first step starts, for activations and for gradients, and keeps them for the
    whole run. A stage keeps its output until the microbatch's backward has ended.

    Source: torch/distributed/pipelining/stage.py (`_prepare_forward_infra`, `fwd_cache`).
    """
    batch, tokens, hidden = dims.boundary
    return batch * tokens * hidden * dims.dtype.bytes


def rotary_bytes(spec: Spec) -> int:
    """Cos and sin of one slot with attention (R-11)."""
    return sum([table.num_bytes for table in rotary_tables(spec)])


def rotary_tables(spec: Spec) -> tuple[RotaryTable, ...]:
    """The tables of one slot with attention in the order in which they are made, [T, ⌈R / 2⌉]; T is the number of positions of a CP rank.

    Layers with a window have their own table, if they have another base.
    """
    positions = spec.batch.seq_length // spec.mesh.cp
    return tuple(
        RotaryTable(2 * positions * frequencies * DType.FP32.bytes, (2 * positions + 1) * frequencies * FP64_BYTES)
        for frequencies in (_frequencies(spec), _window_frequencies(spec))
        if frequencies
    )


def _frequencies(spec: Spec) -> int:
    """Number of frequencies, ⌈R / 2⌉: an odd width, which no layer rotates, also has a table."""
    widths = (family.rotary(section) for family, section in families_of(spec.model) if family.rotary is not None)
    return sum(-(-width // 2) for width in widths)


def _window_frequencies(spec: Spec) -> int:
    """Frequencies in the tables of layers with a window, or with latents of another rotated width; 0 without such tables."""
    attention = spec.model.attention
    if isinstance(attention, LatentAttention):
        rotated = {attention.with_heads(place).rotary_width for place in range(len(attention.layer_latents))}
        return sum(-(-width // 2) for width in rotated - {attention.rotary_width})
    if attention is None or attention.window_rope_theta is None:
        return 0
    return -(-(attention.window_rotary_dim or attention.rotary_width) // 2)


def step_sum_bytes(spec: Spec) -> dict[str, int]:
    """Bytes of each family's sums over the microbatches of a step; families without such sums are absent.

    A relation bias adds, in fp32, the parts of its table's gradient from the layers of a stage.
    """
    sums = {family.letter: family.step_sums(section) * FP64_BYTES for family, section in families_of(spec.model)}
    relation, attention = spec.model.features.relation_bias, spec.model.attention
    if spec.model.features.mtp is not None:
        sums[Outside.MTP] = sum([family.step_sums(section) for family, section in depth_families(spec.model)]) * FP64_BYTES
    if relation is not None and attention is not None:
        sums[Outside.RELATION_BIAS] = relation.num_relations * (attention.num_heads // spec.mesh.tp) * DType.FP32.bytes
    return {letter: num_bytes for letter, num_bytes in sums.items() if num_bytes}


def token_bytes(spec: Spec) -> int:
    """Token ids, or labels, of all microbatches of an optimizer step: int64, held from before the step to its end.

    A TP rank has those of its local tokens; under `vocab_parallel` those of all tokens, because every rank looks all of them up.
    """
    return _rows(spec) * _positions(spec) * DType.INT64.bytes


def input_bytes(spec: Spec) -> int:
    """Inputs of the first slot, allocated in the same way: ids, for n-grams the preceding ids, a byte per class or platform, patches."""
    return token_bytes(spec) + _side_bytes(spec) + spec.schedule.microbatches_per_update * tower_input_bytes(spec)


def label_bytes(spec: Spec) -> int:
    """Inputs of the last slot, in the same way: labels, also of each depth of multi-token prediction, and inputs of its side embeddings."""
    mtp = spec.model.features.mtp
    if mtp is None:
        return token_bytes(spec)
    return token_bytes(spec) * (1 + mtp.depth) + (_side_bytes(spec) * mtp.depth if mtp.side_embeddings else 0)


def _side_bytes(spec: Spec) -> int:
    features = spec.model.features
    ngram, num_categories = features.ngram, sum(each is not None for each in (features.structure, features.platform))
    own = spec.batch.seq_length // (spec.mesh.cp * spec.mesh.tp)
    before = 0 if ngram is None else (ngram.max_order - 1) * own * DType.INT64.bytes
    return _rows(spec) * (before + num_categories * own)


def every_stage_bytes(spec: Spec) -> int:
    """Inputs of every rank, for all microbatches of a step.

    Document starts of packed rows are int32 for each position of the rank's CP pieces; a relation bias needs one byte, the class, for each
    position of the sequence.
    """
    starts = 0 if spec.data.packing == "none" else (spec.batch.seq_length // spec.mesh.cp) * DType.INT32.bytes
    classes = 0 if spec.model.features.relation_bias is None else spec.batch.seq_length
    return _rows(spec) * (starts + classes)


def _positions(spec: Spec) -> int:
    mesh = spec.mesh
    return spec.batch.seq_length // (mesh.cp if mesh.vocab_parallel else mesh.cp * mesh.tp)


def _rows(spec: Spec) -> int:
    return spec.schedule.microbatches_per_update * spec.batch.micro_batch_size


def graph_bytes(spec: Spec) -> int:
    """Tensors that CUDA graphs have in addition to eager steps: a microbatch's inputs, and the sum of the losses, fp64.

    With packed rows also the divisor of the loss, fp32; with a recorded update also its numbers. 0 if steps are eager.
    """
    if not replays_graphs(spec):
        return 0
    inputs = (input_bytes(spec) + label_bytes(spec) + every_stage_bytes(spec)) // spec.schedule.microbatches_per_update
    numbers = NUMBERS * FP64_BYTES if replays_update(spec) else 0
    return inputs + FP64_BYTES + numbers + (DType.FP32.bytes if spec.data.packing == "documents" else 0)


def further_loss_bytes(spec: Spec) -> int:
    """The last slot's loss of further tokens, summed over the microbatches of a step."""
    return 0 if spec.model.features.mtp is None else FP64_BYTES


def side_part(dims: Dims, features: Features, name: str) -> BlockReplay:
    """A side embedding added to the residual stream."""
    return BlockReplay(_side_replay(name), residual(side_storages(dims, features, name) | stream_out(dims)))


@cache
def _side_replay(name: str) -> Replay:
    return replay(side_ops(name))


def side_storages(dims: Dims, features: Features, name: str) -> Shapes:
    """Storages of a side embedding, except its output in the stream."""
    own, section = dims.residual[:2], getattr(features, name)
    if isinstance(section, LayerEmbeddings):
        return layer_embeddings.side_shapes(dims, section)
    if isinstance(section, Ngram):
        tensors = storages(DType.INT64, Column.FEATURE_ACTIVATIONS, {"ids": (*own, section.num_tables)})
        rows = {"rows": (*own, section.num_tables * section.dim), "o": dims.residual}
        return tensors | storages(dims.dtype, Column.FEATURE_ACTIVATIONS, rows)
    tensors = storages(DType.INT64, Column.FEATURE_ACTIVATIONS, {"ids": own})
    return tensors | storages(dims.dtype, Column.FEATURE_ACTIVATIONS, {"rows": (*own, section.bottleneck), "projected": dims.residual})


def side_ops(name: str) -> tuple[Op, ...]:
    """A side embedding's operations, from the stream to the stream."""
    if name == Outside.LAYER_EMBEDDINGS:
        return layer_embeddings.side_ops()
    if name == Outside.NGRAM:
        return (
            Op("hash", (), ("ids",)),
            Op("tables", ("ids",), ("rows",), keeps=("ids",), params=("tables.weight",), grads=()),
            linear("proj", "rows", "o", "proj.weight"),
            add("residual", ("x", "o"), "out"),
        )
    return (
        Op("ids", (), ("ids",)),
        Op("categories", ("ids",), ("rows",), keeps=("ids",), params=("categories.weight",), grads=()),
        linear("proj", "rows", "projected", "proj.weight"),
        Op("gates", ("x", "projected"), ("out",), keeps=("projected",), params=("gates",)),
    )


def relation_bias_part(dims: Dims) -> BlockReplay:
    """Relation ids of a stage with attention; the part has no output in the residual stream."""
    tensors = storages(DType.INT32, Column.FEATURE_ACTIVATIONS, {"ids": (dims.batch, dims.tokens * dims.cp), "out": (0,)})
    return BlockReplay(_relation_bias_replay(), residual(tensors))


@cache
def _relation_bias_replay() -> Replay:
    return replay((Op("ids", (), ("ids", "out"), keeps=("ids",), params=("weight",), grads=()),))


def stream_out(dims: Dims) -> Shapes:
    """The output of a side embedding in the stream."""
    return storages(dims.dtype, Column.ACTIVATIONS, {"out": dims.residual})


def embedding_part(
    dims: Dims, *, vocab_parallel: bool, positions: bool = False, scaled: bool = False, normed: StreamNorm | None = None
) -> BlockReplay:
    """Token ids to the residual stream; learned positions are rows of a table that are added, a factor scales the words, a norm is last."""
    sharded = vocab_parallel and dims.tp > 1
    tensors = storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("out", "words", "scaled", "unnormed"), dims.residual))
    tensors |= storages(dims.dtype, Column.COMMUNICATION, {"partial": dims.gathered})
    tensors |= storages(DType.INT64, Column.ACTIVATIONS, {"rows": (dims.batch, dims.tokens)})
    tensors |= storages(dims.dtype, Column.ACTIVATIONS, {"places": dims.residual[1:], "ones": (dims.hidden,)})
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys(("mean", "rstd"), dims.residual[:2]))
    if dims.streams > 1:
        tensors |= storages(dims.dtype, Column.ACTIVATIONS, {COLLAPSED: dims.residual, OUTPUT: dims.boundary})
    return BlockReplay(_embedding_replay(sharded, positions, scaled, dims.streams > 1, normed), residual(tensors))


@cache
def _embedding_replay(sharded: bool, positions: bool, scaled: bool, repeated: bool, normed: StreamNorm | None) -> Replay:
    end = COLLAPSED if repeated else OUTPUT
    last = end if normed is None else "unnormed"
    words = "scaled" if positions else last
    made = "words" if scaled else words
    ops: tuple[Op, ...] = (Op("embedding", ("x",), (made,), params=("weight",), grads=()),)
    if sharded:
        lookup = Op("embedding", ("x",), ("rows", "partial"), params=("weight",), grads=(), fetches=("rows",))
        ops = lookup, Op("reduce_scatter", ("partial",), (made,))
    if scaled:
        ops += (Op("scale", ("words",), (words,)),)
    if positions:
        ops += (Op("positions", (), ("places",), params=("positions",), grads=()), Op("add", (words, "places"), (last,)))
    ops += () if normed is None else (norm_op("norm", normed, last, end),)
    return replay((*ops, Op("repeat", (end,), (OUTPUT,))) if repeated else ops)


def final_norm_part(dims: Dims, model: Model) -> BlockReplay:
    """The norm before the head, a layer between the two, and the factor of logits, if any (the head is linear)."""
    residuals = model.attention_residuals
    reads = None if residuals is None else residuals.reads(model.num_layers)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("out", "normed", "layer_in", "layer_made", "layer_active"), dims.residual)
    tensors = storages(dims.dtype, Column.ACTIVATIONS, shapes | dict.fromkeys(("ones", "layer_ones"), (dims.hidden,)))
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys(("layer_mean", "layer_rstd"), dims.residual[:2]))
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys(("mean", "rstd"), dims.residual[:2]))
    tensors = residual(tensors)
    tensors |= {} if model.streams is None else stream_shapes(model.streams, dims, last=True)
    tensors |= {} if reads is None else depth_shapes(reads, dims)
    scaled = model.logits_multiplier != 1
    return BlockReplay(_final_norm_replay(model.norm, scaled, model.streams is not None, reads, model.head_layer), tensors)


@cache
def _final_norm_replay(kind: StreamNorm, scaled: bool, collapses: bool, reads: DepthReads | None, layer: HeadLayer | None) -> Replay:
    last = "normed" if scaled else OUTPUT
    made = last if layer is None else "layer_in"
    first = collapse_ops() if collapses else () if reads is None else (attend_op(reads),)
    normed = norm_op("norm", kind, first[0].makes[0] if first else INPUT, made, params=("weight", "bias"))
    more = () if layer is None else _head_layer_ops(layer, kind, last)
    return replay((*first, normed, *more, *((Op("scale", ("normed",), (OUTPUT,)),) if scaled else ())))


def _head_layer_ops(layer: HeadLayer, kind: StreamNorm, made: str) -> tuple[Op, ...]:
    """A product, its activation and a norm; a bias of the logits gets its gradient with the norm's scale."""
    norm = norm_op("layer_norm", kind, "layer_active", made, prefix="layer_")
    return (
        linear("layer", "layer_in", "layer_made", "layer.weight", bias="layer.bias" if layer.bias else None),
        Op("layer activation", ("layer_made",), ("layer_active",), keeps=("layer_made",)),
        norm._replace(params=(*norm.params, "logits.bias")) if layer.logits_bias else norm,
    )


def boundary_part(sent: Boundary, *, packs: bool) -> BlockReplay:
    """The end of a stage that sends values after the stream, or with `packs` false the start of one that receives them."""
    dtype = sent.stream.dtype
    one, everything = sent.stream.shape, (sent.bytes // dtype.bytes,)
    ends = (one, everything) if packs else (everything, one)
    tensors = storages(dtype, Column.ACTIVATIONS, dict(zip((INPUT, OUTPUT), ends, strict=True)))
    return BlockReplay(_boundary_replay(packs), tensors)


@cache
def _boundary_replay(packs: bool) -> Replay:
    return replay((pack_op() if packs else unpack_op(),), counts_input=packs)
