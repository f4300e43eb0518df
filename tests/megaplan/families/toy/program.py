"""Saved tensors of T blocks."""

from __future__ import annotations

from functools import cache

from megaplan.families.toy.section import Toy

from megaplan.blocks.ops import BlockProgram, Dims, add, linear, norm
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.family import Selective

SELECTIVE = Selective("body", frozenset({"down"}))


def toy_program(dims: Dims, toy: Toy, _variant: None, _operations: None, _parameters: DType) -> tuple[BlockProgram, Shapes]:
    """One T block."""
    tensors = storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("normed", "o", "out"), dims.residual))
    tensors |= storages(dims.dtype, Column.ACTIVATIONS, {"narrow": dims.wide(toy.rank)})
    tensors |= storages(dims.stat_dtype, Column.ACTIVATIONS, {"rstd": dims.residual[:2]})
    return _program(), residual(tensors)


@cache
def _program() -> BlockProgram:
    return SELECTIVE.program(
        norm("norm", "x", "normed", "rstd", "norm.weight"),
        linear("down", "normed", "narrow", "down.weight"),
        linear("up", "narrow", "o", "up.weight"),
        add("residual", ("x", "o"), "out"),
    )
