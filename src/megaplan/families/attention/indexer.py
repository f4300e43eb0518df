"""Projections of the sparse-attention indexer, and its storages."""

from megaplan.blocks.ops import Dims, Op
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.attention.keys import BlockIndexer
from megaplan.families.attention.section import Indexer

INDEX = ("indexer.q", "indexer.k", "indexer.weights")


def indexer_ops(sharded: bool) -> list[Op]:
    """Projections whose inputs get no gradient from them; under TP they run on the rank's own tokens and are gathered afterwards."""
    ops = []
    for name, reads, made in zip(("q_up", "k_proj", "head_weights"), ("q_latent_normed", "normed", "normed"), INDEX, strict=True):
        own, param = f"{made}_own" if sharded else made, f"indexer.{name}.weight"
        ops.append(
            Op(f"indexer.{name}", (reads,), (own,), keeps=(reads,), params=(param,), grads=(), keeps_first=True, late=((param, own),))
        )
        if sharded:
            ops.append(Op(f"gather {made}", (own,), (made,)))
    return ops


def indexer_storages(dims: Dims, indexer: Indexer) -> Shapes:
    """Storages of the indexer; under TP the core saves the output of a collective."""
    own, wide = dims.residual[:2], dims.wide
    widths = (indexer.num_heads, indexer.head_dim), (indexer.head_dim,), (indexer.num_heads,)
    kept = {name: wide(*width) for name, width in zip(INDEX, widths, strict=True)}
    found = {
        **storages(dims.dtype, Column.ACTIVATIONS if dims.tp == 1 else Column.COMMUNICATION, kept),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, dict.fromkeys(("indexer.threshold", "indexer.lse"), wide())),
    }
    if dims.tp > 1:
        shapes = {f"{name}_own": (*own, *width) for name, width in zip(INDEX, widths, strict=True)}
        found |= storages(dims.dtype, Column.ACTIVATIONS, shapes)
    if dims.cp > 1:
        whole = (dims.batch, dims.tokens * dims.cp, indexer.head_dim)
        found |= storages(dims.stat_dtype, Column.ACTIVATIONS, {"indexer.keys": wide(indexer.head_dim)})
        found |= storages(dims.stat_dtype, Column.COMMUNICATION, {"indexer.keys_gathered": whole})
    return found


def block_ops() -> tuple[Op, ...]:
    """The choice of blocks of keys, which keeps its normed input; its scores exist inside it alone."""
    params = tuple(f"indexer.{name}_{kind}.weight" for kind in ("proj", "norm") for name in "qk")
    made = ("indexer.q", "indexer.k", "indexer.blocks")
    return (Op("choose blocks", ("normed",), made, keeps=("normed", "indexer.q", "indexer.k"), params=params, grads=()),)


def block_storages(dims: Dims, indexer: BlockIndexer) -> Shapes:
    """Storages of that choice."""
    own = {"indexer.q": dims.wide(indexer.num_heads, indexer.head_dim), "indexer.k": dims.wide(indexer.head_dim)}
    chosen = {"indexer.blocks": dims.wide(indexer.num_heads, indexer.top_blocks)}
    return storages(dims.dtype, Column.ACTIVATIONS, own) | storages(DType.INT32, Column.ACTIVATIONS, chosen)
