"""Latent queries, outputs of groups of heads, and keys that are compressed from several positions, all for grouped-query attention.

A compressed key is the sum of `rate` positions, weighted by a softmax of a projection of the input plus a learned number per position. A
separate indexer chooses some of these keys, using index keys that are compressed in the same way; the choice has no gradient.

Source: the DeepSeek-V4 implementation of transformers.
"""

from collections.abc import Iterator

from megakernels.facts import Work
from megaplan.blocks.costs import detached_linear_work, linear_work, norm_work
from megaplan.blocks.ops import Dims, Op, Projection, linear, norm, partial_gradient, project
from megaplan.blocks.storages import Shapes, storages
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.attention.keys import Compressor
from megaplan.families.attention.section import GroupedQueryAttention
from megaplan.inventory.makers import column, replicated, row
from megaplan.inventory.makers import norm as scale
from megaplan.inventory.tensors import Group, Init, ParamTensor

PART, O_DOWN = "A", "o_down"
COMPRESSED, CHOSEN = "compressor.keys", "compressor.chosen"


def query_tensors(attention: GroupedQueryAttention, hidden_size: int) -> list[ParamTensor]:
    """The latent of queries, if any."""
    if attention.query_rank is None:
        return []
    return [
        replicated("q_down.weight", (attention.query_rank, hidden_size), Group.MATRIX),
        scale("q_latent_norm.weight", attention.query_rank),
    ]


def output_tensors(attention: GroupedQueryAttention, hidden_size: int, made: int) -> list[ParamTensor]:
    """The output projection, with a projection of each group of heads before it."""
    groups, rank = attention.output_groups, attention.output_rank
    if not groups:
        return [row("o_proj.weight", hidden_size, made)]
    return [
        column(f"{O_DOWN}.weight", groups * rank, made // groups, num_matrices=groups),
        row("o_proj.weight", hidden_size, groups * rank),
    ]


def compressor_tensors(attention: GroupedQueryAttention, own: Compressor, hidden_size: int) -> list[ParamTensor]:
    """A layer's compressor, and its indexer."""
    tensors = [*_compressing("compressor", own, attention.head_dim, hidden_size)]
    if own.top_k is None:
        return tensors
    query = own.index_heads * own.index_dim, attention.query_rank or hidden_size
    return [
        *tensors,
        *_compressing("indexer", own, own.index_dim, hidden_size),
        replicated("indexer.q_proj.weight", query, Group.MATRIX),
        replicated("indexer.head_weights.weight", (own.index_heads, hidden_size), Group.MATRIX),
    ]


def _compressing(name: str, own: Compressor, dim: int, hidden_size: int) -> Iterator[ParamTensor]:
    wide = own.halves * dim
    yield replicated(f"{name}.kv_proj.weight", (wide, hidden_size), Group.MATRIX)
    yield replicated(f"{name}.gate_proj.weight", (wide, hidden_size), Group.MATRIX)
    yield replicated(f"{name}.position_bias", (own.rate, wide), Group.OTHER, Init.ZEROS)
    yield scale(f"{name}.norm.weight", dim)


def query_ops(made: str, bias: str | None, *, sharded: bool) -> tuple[Op, ...]:
    """Queries from their latent."""
    return (
        linear("q_down", "normed", "q_latent", "q_down.weight"),
        norm("q_latent_norm", "q_latent", "q_latent_normed", "q_latent_rstd", "q_latent_norm.weight"),
        *project("q_latent_normed", "q_latent_gathered", Projection("q_proj", made, "q_proj.weight", bias), sharded=sharded),
    )


def compress_ops(*, chooses: bool) -> tuple[Op, ...]:
    """Compressed keys, and a choice of them; the indexer's products exist only inside the choice."""
    params = "compressor.position_bias", "compressor.norm.weight"
    reads = "compressor.kv", "compressor.gate"
    ops = (
        linear("compressor.kv_proj", "normed", reads[0], "compressor.kv_proj.weight"),
        linear("compressor.gate_proj", "normed", reads[1], "compressor.gate_proj.weight"),
        Op("compress", reads, (COMPRESSED,), keeps=(*reads, COMPRESSED), params=params),
    )
    if not chooses:
        return ops
    index = tuple(f"indexer.{name}" for name in _INDEX)
    return (*ops, Op("choose keys", ("normed", "q_latent_normed"), (CHOSEN,), keeps=("normed", "q_latent_normed"), params=index, grads=()))


_INDEX = ("kv_proj.weight", "gate_proj.weight", "position_bias", "norm.weight", "q_proj.weight", "head_weights.weight")


def more_storages(dims: Dims, attention: GroupedQueryAttention, own: Compressor | None) -> Shapes:
    """Storages of all of these operations."""
    tokens, width, found = dims.residual[:2], attention.head_dim, Shapes()
    if attention.query_rank is not None:
        latent = dict.fromkeys(("q_latent", "q_latent_normed"), (*tokens, attention.query_rank))
        found |= storages(dims.dtype, Column.ACTIVATIONS, latent) | storages(dims.stat_dtype, Column.ACTIVATIONS, {"q_latent_rstd": tokens})
        gathered = dict.fromkeys(("q_latent_gathered", partial_gradient("q_latent_gathered")), dims.wide(attention.query_rank))
        found |= storages(dims.dtype, Column.COMMUNICATION, gathered)
    if attention.output_groups:
        found |= storages(dims.dtype, Column.ACTIVATIONS, {"o_low": dims.wide(attention.output_groups * attention.output_rank // dims.tp)})
    if own is not None:
        wide = dict.fromkeys(("compressor.kv", "compressor.gate"), (*tokens, own.halves * width))
        few = dims.batch, -(-dims.tokens // own.rate), width
        found |= storages(dims.dtype, Column.ACTIVATIONS, {**wide, COMPRESSED: few})
        found |= storages(DType.INT32, Column.ACTIVATIONS, {CHOSEN: dims.wide(own.top_k or 0)})
    return found


def query_works(load: Workload, attention: GroupedQueryAttention, hidden_size: int, width: int) -> Works:
    """Queries of this width, from the input or from a latent."""
    rank = attention.query_rank
    if rank is None:
        return (linear_work(load, "q_proj", PART, hidden_size, width),)
    return (
        linear_work(load, "q_down", PART, hidden_size, rank, own_tokens=True),
        norm_work(load, "q_latent_norm", PART, rank, own_tokens=True),
        linear_work(load, "q_proj", PART, rank, width),
    )


def output_works(load: Workload, attention: GroupedQueryAttention, hidden_size: int, made: int) -> Works:
    """The output projection of heads of this width together."""
    if not attention.output_groups:
        return (linear_work(load, "o_proj", PART, made, hidden_size, closes=True),)
    low = attention.output_groups * attention.output_rank // load.tp
    return (
        linear_work(load, O_DOWN, PART, made, attention.output_rank),
        linear_work(load, "o_proj", PART, low, hidden_size, closes=True),
    )


def compressor_works(load: Workload, attention: GroupedQueryAttention, own: Compressor, hidden_size: int) -> Works:
    """Products for compressed keys, and the indexer's with its scores of half of all pairs, forward alone."""
    wide, heads, dim = own.halves * attention.head_dim, own.index_heads, own.index_dim
    row = wide * load.itemsize
    pooled = OpWork("compress", PART, Work(moved_forward=2 * row, moved_input=4 * row), own_tokens=True)
    names = "compressor.kv_proj", "compressor.gate_proj"
    ops: Works = (*(linear_work(load, name, PART, hidden_size, wide, own_tokens=True) for name in names), pooled)
    if own.top_k is None:
        return ops
    scores = Work(forward=heads * dim * load.seq_length // own.rate, moved_forward=heads * dim * load.itemsize)
    return (
        *ops,
        detached_linear_work(load, "indexer.kv_proj", PART, hidden_size, own.halves * dim, own_tokens=True),
        detached_linear_work(load, "indexer.gate_proj", PART, hidden_size, own.halves * dim, own_tokens=True),
        detached_linear_work(load, "indexer.q_proj", PART, attention.query_rank or hidden_size, heads * dim, own_tokens=True),
        detached_linear_work(load, "indexer.head_weights", PART, hidden_size, heads, own_tokens=True),
        OpWork("indexer", "attention", scores),
    )


def keys_seen(load: Workload, window: int | None, own: Compressor) -> int:
    """Most keys that a token attends to: the keys of its window, and compressed ones."""
    compressed = -(-load.seq_length // own.rate)
    return min(window or load.seq_length, load.seq_length) + min(own.top_k or compressed, compressed)
