"""Operations of T blocks, what they keep, and their work."""

from functools import cache

from megaplan.families.toy.section import Toy

from megaplan.blocks.costs import linear_work, residual_work
from megaplan.blocks.ops import BlockProgram, Dims, add, linear, norm
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.blocks.work import Workload, Works
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.family import Selective

PART = "T"
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


def toy_work(load: Workload, toy: Toy, hidden_size: int, _variant: None = None) -> Works:
    """One T block, pre-norm and residual included."""
    down = linear_work(load, "down", PART, hidden_size, toy.rank)
    return residual_work(load, PART, hidden_size), down, linear_work(load, "up", PART, toy.rank, hidden_size, closes=True)
