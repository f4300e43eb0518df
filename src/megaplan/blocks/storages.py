"""Storages: a name's bytes, the budget column they belong to, and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from megaplan.blocks.dims import Dims
from megaplan.blocks.ops import INPUT, OUTPUT, partial_gradient
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType

Stored = tuple[int, Column, tuple[int, ...], DType, Basis]
"""A storage: its bytes, the column they stand in, and what they are made of. A plain tuple: an evaluation makes hundreds."""
Shapes = dict[str, Stored]


def storages(dtype: DType, column: Column, shapes: Mapping[str, tuple[int, ...]], basis: Basis = Basis.EXACT) -> Shapes:
    """Named storages of one dtype and column."""
    size = dtype.bytes
    return {name: (prod(shape) * size, column, shape, dtype, basis) for name, shape in shapes.items()}


def residual(shapes: Shapes) -> Shapes:
    """Add the block's input under its name, shaped as its output."""
    shapes[INPUT] = shapes[OUTPUT]
    return shapes


def mixer_storages(dims: Dims, shapes: Mapping[str, tuple[int, ...]], statistics: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Storages of a mixer between its input and the block's output.

    Args:
        dims: Local sizes.
        shapes: Storages of its own in the dtype of activations.
        statistics: Statistics and states of its own.
    """
    stream = dict.fromkeys(("normed", "o", "out"), dims.residual)
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, {**shapes, **stream}),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {"rstd": dims.residual[:2], **statistics}),
        **storages(dims.dtype, Column.COMMUNICATION, dict.fromkeys(("gathered", partial_gradient("gathered"), "partial"), dims.gathered)),
    }
