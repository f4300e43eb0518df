"""Saved tensors of optional features.

- n-gram: the rows of every hashed table, concatenated [B, T, tables · dim], projected and added to the residual stream; keeps the int64 row
  ids and the concatenated rows.
- structure, platform: category row [B, T, bottleneck], projected, times tanh of a gate, plus a gated bias; keeps ids, row and projection.
- relation bias: the core reads the table by one int32 class a key, of all positions of a sequence, and adds it inside; keeps the classes,
  no T × T bias.

Multi-token prediction has a module of its own (`megaplan.hosts.megarun.depths`).
"""

from __future__ import annotations

from functools import cache

from megaplan.blocks.dims import Dims
from megaplan.blocks.ops import Op, add, linear
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.parts import BlockReplay
from megaplan.hosts.megarun.program import Replay, replay
from megaplan.inventory.tensors import Outside
from megaplan.spec.models import Features, Ngram


def side_part(dims: Dims, features: Features, name: str) -> BlockReplay:
    """A side embedding added to the residual stream."""
    return BlockReplay(_side_replay(name), residual(side_storages(dims, features, name) | stream_out(dims)))


@cache
def _side_replay(name: str) -> Replay:
    return replay(side_ops(name))


def side_storages(dims: Dims, features: Features, name: str) -> Shapes:
    """Storages of a side embedding, except its output in the stream."""
    own, section = dims.residual[:2], getattr(features, name)
    if isinstance(section, Ngram):
        tensors = storages(DType.INT64, Column.FEATURE_ACTIVATIONS, {"ids": (*own, section.num_tables)})
        rows = {"rows": (*own, section.num_tables * section.dim), "o": dims.residual}
        return tensors | storages(dims.dtype, Column.FEATURE_ACTIVATIONS, rows)
    tensors = storages(DType.INT64, Column.FEATURE_ACTIVATIONS, {"ids": own})
    return tensors | storages(dims.dtype, Column.FEATURE_ACTIVATIONS, {"rows": (*own, section.bottleneck), "projected": dims.residual})


def side_ops(name: str) -> tuple[Op, ...]:
    """A side embedding's operations, from the stream to the stream."""
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
