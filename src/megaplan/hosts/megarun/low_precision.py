"""A block's program whose products multiply in 8 or 4 bits: the copies that replace 16-bit inputs, and the temporary copies of a product.

A product saves the copy of its input that its weight gradient multiplies, unless another operation already saves that input in 16 bits;
products of one input share one copy. While it runs it has a row-wise copy of its input and of its weight, in backward copies of the
output's gradient and of the weight. Only layers are covered: the head, and prediction, keep 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megaplan.blocks.ops import BlockProgram, Op
from megaplan.blocks.storages import Shapes
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.low_precision import Recipe

EXPERTS = "experts"
"""The operation of routed experts, whose products are no separate operations."""
SAVED, INPUT_COPY, WEIGHT_COPY, GRADIENT_COPY = ".low", ".row_copy", ".weight_copy", ".gradient_copy"


class Copies(NamedTuple):
    """A program with its copies.

    Attributes:
        program: The program with the copies.
        saved: Inputs that are saved as copies.
        inputs: Inputs with a row-wise copy for a product.
        weights: Parameters of each product, by the product's name.
        gradients: Outputs whose gradients are copied.
    """

    program: BlockProgram
    saved: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[tuple[str, tuple[str, ...]], ...]
    gradients: tuple[str, ...]


def in_low_precision(
    program: BlockProgram, shapes: Shapes, recipe: Recipe, parameters: Mapping[str, tuple[int, ...]]
) -> tuple[BlockProgram, Shapes]:
    """The program and its storages under a recipe.

    Args:
        program: Program of a block.
        shapes: Storages of the program.
        recipe: Scaling of operands.
        parameters: Shapes of the block's parameters on the rank, by name.
    """
    copies = _with_copies(program, frozenset(shapes))
    found = dict(shapes)
    for name in copies.saved:
        found[name + SAVED] = _stored(shapes[name], recipe.columnwise_bytes(*_matrix(shapes[name])))
    for name in copies.inputs:
        found[name + INPUT_COPY] = _stored(shapes[name], recipe.rowwise_bytes(*_matrix(shapes[name])))
    for name in copies.gradients:
        found[name + GRADIENT_COPY] = _stored(shapes[name], recipe.both_bytes(*_matrix(shapes[name])))
    for name, owned in copies.weights:
        matrices = [shape for one in owned if len(shape := parameters.get(one, ())) > 1]
        size = sum(recipe.rowwise_bytes(prod(shape[:-1]), shape[-1], weight=True) for shape in matrices)
        found[name + WEIGHT_COPY] = (size, Column.WORKSPACE, (size,), DType.FP8, Basis.MODELLED)
    return copies.program, found


@lru_cache(maxsize=64)
def _with_copies(program: BlockProgram, storages: frozenset[str]) -> Copies:
    products = _products(program)
    kept_elsewhere = {name for op in program.ops if op.name not in products for name in op.keeps}
    saved: dict[str, None] = {}
    inputs: dict[str, None] = {}
    gradients: dict[str, None] = {}
    weights: list[tuple[str, tuple[str, ...]]] = []
    ops: list[Op] = []
    for op in program.ops:
        if op.name not in products:
            ops.append(op)
            continue
        source = op.reads[0]
        makes, keeps, reads, fetches = op.makes, op.keeps, op.reads, op.fetches
        weights.append((op.name, op.params))
        makes, fetches = (*makes, op.name + WEIGHT_COPY), (*fetches, op.name + WEIGHT_COPY)
        if source in storages:
            if source not in inputs:
                inputs[source] = None
                makes = (*makes, source + INPUT_COPY)
            if source in keeps and source not in kept_elsewhere:
                keeps = tuple(source + SAVED if name == source else name for name in keeps)
                if source in saved:
                    reads = (*reads, source + SAVED)
                else:
                    saved[source] = None
                    makes = (*makes, source + SAVED)
        for output in (name for name in op.makes[:1] if name in storages):
            gradients[output] = None
            fetches = (*fetches, output + GRADIENT_COPY)
        ops.append(op._replace(makes=makes, keeps=keeps, reads=reads, fetches=fetches, grads=op.reads if op.grads is None else op.grads))
    changed = BlockProgram(tuple(ops), program.held, program.reruns, program.caches, program.after)
    return Copies(changed, tuple(saved), tuple(inputs), tuple(weights), tuple(gradients))


def _products(program: BlockProgram) -> set[str]:
    """Products with parameters among the operations."""
    return {op.name for op in program.ops if op.name == EXPERTS or op.late}


def _matrix(stored: tuple[int, Column, tuple[int, ...], DType, Basis]) -> tuple[int, int]:
    shape = stored[2]
    return prod(shape[:-1]), shape[-1]


def _stored(like: tuple[int, Column, tuple[int, ...], DType, Basis], size: int) -> tuple[int, Column, tuple[int, ...], DType, Basis]:
    """A copy's storage, in the column of its source."""
    return size, like[1], (size,), DType.FP8, Basis.MODELLED
