"""What optional features keep. All are planned operations: priced from the formulas here until megarun builds them.

- n-gram: the rows of every hashed table, concatenated [B, T, tables · dim], projected and added to the residual stream; keeps the int64 row
  ids and the concatenated rows.
- structure, platform: category row [B, T, bottleneck], projected, times tanh of a gate, plus a gated bias; keeps ids, row and projection.
- relation bias: the core reads the table by one int32 relation id a token and adds it inside; keeps the ids, no T × T bias.
- MTP depth (DeepSeek-V3, arXiv:2412.19437, equations 21 to 25): norms of hidden and of the next token's embedding, concatenated and
  projected, an A block, an ungated MLP, an output norm, the shared head and its own loss.
"""

from __future__ import annotations

from functools import cache

from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.attention import AttentionKey, attention_key, attention_ops, attention_storages
from megaplan.hosts.megarun.dims import Dims
from megaplan.hosts.megarun.embedding import head_ops, head_storages
from megaplan.hosts.megarun.mlp import mlp_ops, mlp_storages
from megaplan.hosts.megarun.parts import Part, Shapes, residual, storages
from megaplan.hosts.megarun.program import INPUT, OUTPUT, Op, Replay, add, linear, norm, replay
from megaplan.spec.models import CategoryEmbedding, Model, MultiTokenPrediction, Ngram

ADDED_ATTENTION, ADDED_MLP = "attention.", "mlp."


def ngram_part(dims: Dims, ngram: Ngram) -> Part:
    """N-gram embedding added to the residual stream."""
    own = dims.residual[:2]
    tensors = storages(DType.INT64, Column.FEATURE_ACTIVATIONS, {"ids": (*own, ngram.num_tables)})
    tensors |= storages(dims.dtype, Column.FEATURE_ACTIVATIONS, {"rows": (*own, ngram.num_tables * ngram.dim), "o": dims.residual})
    return Part(_ngram_replay(), residual(tensors | _out(dims)))


@cache
def _ngram_replay() -> Replay:
    return replay(
        (
            Op("hash", (), ("ids",)),
            Op("tables", ("ids",), ("rows",), keeps=("ids",), params=("tables.weight",), grads=()),
            linear("proj", "rows", "o", "proj.weight"),
            add("residual", ("x", "o"), "out"),
        )
    )


def category_part(dims: Dims, category: CategoryEmbedding) -> Part:
    """Structure or platform embedding added to the residual stream."""
    own = dims.residual[:2]
    tensors = storages(DType.INT64, Column.FEATURE_ACTIVATIONS, {"ids": own})
    tensors |= storages(dims.dtype, Column.FEATURE_ACTIVATIONS, {"rows": (*own, category.bottleneck), "projected": dims.residual})
    return Part(_category_replay(), residual(tensors | _out(dims)))


@cache
def _category_replay() -> Replay:
    return replay(
        (
            Op("ids", (), ("ids",)),
            Op("categories", ("ids",), ("rows",), keeps=("ids",), params=("categories.weight",), grads=()),
            linear("proj", "rows", "projected", "proj.weight"),
            Op("gates", ("x", "projected"), ("out",), keeps=("projected",), params=("gates",)),
        )
    )


def relation_bias_part(dims: Dims) -> Part:
    """Relation ids of a stage that attends; it stands beside the residual stream and hands nothing on."""
    tensors = storages(DType.INT32, Column.FEATURE_ACTIVATIONS, {"ids": (dims.batch, dims.tokens), "out": (0,)})
    return Part(_relation_bias_replay(), residual(tensors))


@cache
def _relation_bias_replay() -> Replay:
    return replay((Op("ids", (), ("ids", "out"), keeps=("ids",), params=("weight",), grads=()),))


def mtp_part(dims: Dims, model: Model, mtp: MultiTokenPrediction, *, vocab_parallel: bool) -> Part:
    """One MTP depth; `out` is its hidden state, which the next depth reads."""
    attention = model.attention
    if attention is None:
        raise ValueError("MTP needs a section model.attention and has none; check_rules reports this")
    sharded = vocab_parallel and dims.tp > 1
    shapes = {"embedding": dims.residual, "joined": (*dims.residual[:2], 2 * dims.hidden)}
    shapes |= dict.fromkeys(("hidden_normed", "embedding_normed", "projected", "mlp.normed", "mlp.mlp", "normed"), dims.residual)
    statistics = dict.fromkeys(("hidden_rstd", "embedding_rstd", "mlp.rstd", "output_rstd"), dims.residual[:2])
    tensors = {
        **storages(dims.dtype, Column.ACTIVATIONS, shapes),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, statistics),
        **_prefixed(attention_storages(dims, attention), ADDED_ATTENTION),
        **mlp_storages(dims, mtp.ffn_hidden_size, ADDED_MLP),
        **head_storages(dims, model.vocab_size, vocab_parallel=vocab_parallel, made="loss"),
    }
    return Part(_mtp_replay(attention_key(attention), dims.tp > 1, dims.cp > 1, sharded), residual(tensors | _out(dims)))


@cache
def _mtp_replay(key: AttentionKey, sharded: bool, context: bool, vocab_parallel: bool) -> Replay:
    inner, held = attention_ops(key, rotates=True, indexed=False, sharded=sharded, context=context)
    rename = {INPUT: "projected", OUTPUT: f"{ADDED_ATTENTION}out"}
    ops = (
        Op("embedding", (), ("embedding",), params=("embedding.weight",)),
        norm("hidden_norm", "x", "hidden_normed", "hidden_rstd", "hidden_norm.weight"),
        norm("embedding_norm", "embedding", "embedding_normed", "embedding_rstd", "embedding_norm.weight"),
        Op("join", ("hidden_normed", "embedding_normed"), ("joined",)),
        linear("proj", "joined", "projected", "proj.weight"),
        *(_renamed(op, ADDED_ATTENTION, rename) for op in inner),
        norm("mlp.norm", f"{ADDED_ATTENTION}out", "mlp.normed", "mlp.rstd", "mlp.norm.weight"),
        *(_renamed(op, ADDED_MLP, {}) for op in mlp_ops(False, sharded)),
        add("residual", (f"{ADDED_ATTENTION}out", "mlp.mlp"), "out"),
        norm("output_norm", "out", "normed", "output_rstd", "output_norm.weight"),
        *head_ops(vocab_parallel, "normed", "head.weight", made="loss"),
    )
    return replay(ops, held=frozenset(f"{ADDED_ATTENTION}{name}" for name in held), arrives="loss", starts=True)


def _renamed(op: Op, prefix: str, rename: dict[str, str]) -> Op:
    def names(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(rename.get(name, f"{prefix}{name}") for name in old)

    return Op(
        f"{prefix}{op.name}",
        names(op.reads),
        names(op.makes),
        names(op.keeps),
        tuple(f"{prefix}{name}" for name in op.params),
        None if op.grads is None else names(op.grads),
        names(op.fetches),
        op.flow,
        names(op.holds),
        op.keeps_first,
        late_fetches=names(op.late_fetches),
    )


def _prefixed(tensors: Shapes, prefix: str) -> Shapes:
    return {f"{prefix}{name}": stored for name, stored in tensors.items()}


def _out(dims: Dims) -> Shapes:
    return storages(dims.dtype, Column.ACTIVATIONS, {"out": dims.residual})
