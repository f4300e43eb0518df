"""Storages: a name's bytes, the budget column they belong to, and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from megaplan.blocks.ops import INPUT, OUTPUT
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
