"""Weights of frozen linears in four or eight bits (`lora.base`): their storage on a rank, and the dequantised matrices.

A weight is one tensor of bytes, each row a self-contained record (`megakernels.ops.packed_weight`): FSDP2 shards and gathers it like any
other tensor, without a cast. Each product dequantises the full matrix to the dtype of activations, in forward and again in backward, and
frees it.
"""

from collections.abc import Mapping
from math import prod

from megakernels.ops.packed_weight.facts import Packing
from megaplan.blocks.ops import BlockProgram, Op
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.inventory.adapters import linear_of, packable, packed_tensor
from megaplan.inventory.tensors import Block, make_block

UNPACKED, UNPACKED_AGAIN = ".unpacked", ".unpacked_again"
"""Storages of an operation's matrices, made from its weights in forward and in backward."""


def packed_block(packing: Packing | None, block: Block, tp: int) -> Block:
    """The block with packed weights as tensors of bytes, in group `packed`."""
    if packing is None:
        return block
    tensors = (packed_tensor(packing, tensor, tp) if packable(block, tensor) else tensor for tensor in block.tensors)
    return make_block(block.family, tuple(tensors), block.variant)


def packed_weights(program: BlockProgram) -> frozenset[str]:
    """The weights of a layer's program that `lora.base` packs."""
    return frozenset(param for op in program.ops for param, _ in op.late if linear_of(param) is not None)


def unpacked_op(op: Op, source: Op, weights: frozenset[str]) -> Op:
    """An operation with frozen parameters whose linears have packed weights.

    Args:
        op: The operation with its adapters, if any.
        source: The operation as its family defines it.
        weights: The packed weights.
    """
    if not any(param in weights for param, _ in source.late):
        return op
    gathered = tuple(name for name in op.fetches if name in (*source.fetches, *source.late_fetches))
    before = (((*gathered, op.name + UNPACKED_AGAIN), not source.fetches),)
    return op._replace(makes=(*op.makes, op.name + UNPACKED), hands_views=False, keeps_first=False, before=before)


def unpacked_shapes(op: Op, made: Shapes, weights: Mapping[str, tuple[int, ...]], narrow: Mapping[str, int], dtype: DType) -> Shapes:
    """Storages of the matrices that an operation makes of packed weights, in forward and in backward.

    A matrix is freed after its product. An operation of several linears makes their products in order, so forward adds to its results the
    excess of a matrix over the later products.

    Args:
        op: The operation, as its family has it.
        made: Storages of the program.
        weights: Local shapes of the block's packed weights.
        narrow: Elements of the narrow rows of adapted linears, by weight.
        dtype: Dtype of activations.
    """
    largest = beyond = behind = 0
    for param, output in reversed(op.late):
        size = prod(weights[param]) if param in weights else 0
        largest, beyond = max(largest, size), max(beyond, size - behind)
        behind += prod(made[output][2]) + narrow.get(param, 0)
    if not largest:
        return {}
    return storages(dtype, Column.ACTIVATIONS, {op.name + UNPACKED: (beyond,), op.name + UNPACKED_AGAIN: (largest,)})
