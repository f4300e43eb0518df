"""A bank of experts that multiplies in eight bits, as megarun runs it (`megakernels.fp8_experts`): saved tensors and scratch.

Experts read tokens, or rows that arrived, in place with all kernels. On one rank they save the 16-bit tokens, which the router saves too,
and quantise them again in backward. Rows that arrived from other ranks are saved as the transposed copy that the weight gradients multiply,
each expert's rows padded to a multiple of 16, with a scale for each expert's columns; formats with scales of blocks save the rows in 16
bits.
"""

from collections.abc import Mapping

from megakernels.ops.fp8_experts.facts import ScaledBank
from megakernels.ops.fp8_linear.facts import BLOCKS, DELAYED, SCALE_BYTES
from megakernels.ops.moe.facts import ExpertSizes
from megaplan.blocks.ops import BANK, BlockProgram, Op
from megaplan.blocks.storages import Shapes
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.families.moe.travel import ARRIVED, INSIDE_BACKWARD, INSIDE_FORWARD

LOW, SCALES = "experts.low", "experts.low_scales"


def keeps_copy(program: BlockProgram, policy: str, *, emulated: bool) -> bool | None:
    """True if a block's bank keeps a copy of its input; None if the block has no bank.

    If selective recompute runs the bank again, its input is saved for that.
    """
    bank = next((op for op in program.ops if op.name == BANK), None)
    return None if bank is None else bank.reads[0] == ARRIVED and policy != "selective" and not emulated


def bank_in_eight_bits(
    program: BlockProgram,
    shapes: Shapes,
    parameters: Mapping[str, tuple[int, ...]],
    policy: str,
    scaling: str,
    *,
    fused: bool,
    packed: frozenset[str],
) -> tuple[BlockProgram, Shapes]:
    """The program and storages of a block with its bank, if any, in eight bits."""
    emulated = scaling in BLOCKS
    keeps = keeps_copy(program, policy, emulated=emulated)
    if keeps is None:
        return program, shapes
    op = next(op for op in program.ops if op.name == BANK)
    source, given = shapes[op.reads[0]], shapes[op.reads[1]]
    experts, width, hidden = parameters["experts.up_proj"]
    slots = given[2][1] if len(given[2]) > 1 else 1
    gated, bias, size = "experts.gate_proj" in op.params, "experts.up_proj_bias" in op.params, source[3].bytes
    low = "experts.up_proj" in packed, "experts.down_proj" in packed
    sizes = ExpertSizes(given[2][0], slots, experts, width, hidden, gated, bias, size)
    bank = ScaledBank(sizes, scaling == "rows", fused, keeps, emulated, low, scaling == DELAYED)
    inside = bank.inside((experts * width * size * bias * gated, experts * width * size * bias, experts * hidden * size * bias))
    basis = given[4]
    found = dict(shapes)
    found[INSIDE_FORWARD], found[INSIDE_BACKWARD] = _inside(inside.forward, basis), _inside(inside.backward, basis)
    if not keeps:
        return program, found
    rows, columns = bank.kept_shape
    num_scales = experts * hidden
    found[LOW] = rows * columns, Column.ACTIVATIONS, bank.kept_shape, DType.FP8, basis
    found[SCALES] = SCALE_BYTES * num_scales, Column.ACTIVATIONS, (num_scales,), DType.FP32, Basis.EXACT
    return _keeping(program), found


def _keeping(program: BlockProgram) -> BlockProgram:
    """The program with a bank that saves the copy; the calling frame references the arrived rows until rows have been returned."""
    ops: list[Op] = []
    behind = False
    for op in program.ops:
        if op.name == BANK:
            keeps = tuple(name for name in op.keeps if name != op.reads[0])
            ops.append(op._replace(makes=(*op.makes, LOW, SCALES), keeps=(*keeps, LOW, SCALES)))
            behind = True
            continue
        ops.append(op._replace(holds=(*op.holds, ARRIVED)) if behind else op)
        behind = behind and "combined" not in op.makes
    return BlockProgram(tuple(ops), program.held, program.reruns, program.caches, program.after)


def _inside(size: int, basis: Basis) -> tuple[int, Column, tuple[int, ...], DType, Basis]:
    return size, Column.WORKSPACE, (size,), DType.FP8, basis
