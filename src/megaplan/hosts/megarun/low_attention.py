"""A block's program whose attention multiplies eight-bit operands, as megarun runs it (`megakernels.fp8_attention`).

The core saves copies of queries, keys and values in eight bits and their scales instead of the tensors themselves, but not its output: the
backward recomputes the softmax weights. So the output projection saves its own copy of the output, in eight bits under the recipe.
"""

from functools import lru_cache
from math import prod

from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.fp8_attention.facts import NUM_SCALES, LowAttention
from megakernels.ops.fp8_linear.facts import SCALE_BYTES
from megaplan.blocks.ops import BlockProgram, Op
from megaplan.blocks.storages import INSIDE, Shapes
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType

CORE, OPERANDS = "attention", ("q", "k", "v")
LOWS = tuple(f"{CORE}.{name}_low" for name in OPERANDS)
SCALES, IN_FORWARD, IN_BACKWARD = f"{CORE}.scales", f"{CORE}.in_forward", f"{CORE}.in_backward"


def attends(program: BlockProgram) -> bool:
    """True if a block has a core that can multiply in eight bits: a core with its own queries, keys and values."""
    return any(op.name == CORE and op.reads[:3] == OPERANDS for op in program.ops)


def attention_in_eight_bits(program: BlockProgram, shapes: Shapes, sizes: AttentionSizes) -> tuple[BlockProgram, Shapes]:
    """The program of a block whose core multiplies in eight bits, and its storages; `sizes` are the core's."""
    of_call = sizes.batch, sizes.keys, sizes.heads, sizes.groups, sizes.width, sizes.value_width, sizes.itemsize
    low = LowAttention(*of_call, sizes.window, sizes.packed, sizes.capped)
    found = dict(shapes)
    for name, copy in zip(OPERANDS, LOWS, strict=True):
        shape = shapes[name][2]
        found[copy] = prod(shape), Column.ACTIVATIONS, shape, DType.FP8, Basis.EXACT
    found[SCALES] = NUM_SCALES * SCALE_BYTES, Column.ACTIVATIONS, (NUM_SCALES,), DType.FP32, Basis.EXACT
    for name, size in ((IN_FORWARD, low.forward_bytes), (IN_BACKWARD, low.backward_bytes)):
        found[name] = size, Column.WORKSPACE, (size,), DType.FP8, Basis.EXACT
    return _keeping_copies(program), found


@lru_cache(maxsize=64)
def _keeping_copies(program: BlockProgram) -> BlockProgram:
    ops = tuple(_core(op) if op.name == CORE else op for op in program.ops)
    return BlockProgram(ops, program.held, program.reruns, program.caches, program.after)


def _core(op: Op) -> Op:
    made = tuple(name for name in op.makes if name != INSIDE)
    return op._replace(makes=(*made, *LOWS, SCALES, IN_FORWARD), keeps=(*LOWS, SCALES, "lse"), fetches=(IN_BACKWARD,))
