"""A bank of experts that multiplies in eight bits, as megarun runs it (`megakernels.fp8_experts`): what it keeps and what it holds inside.

Experts read tokens, or rows that arrived, where they are, whatever kernels run. On one rank they keep the tokens in 16 bits, which the
router keeps anyway, and quantise them again in backward. Rows that arrived from other ranks are kept as the transposed copy that the weight
gradients multiply, each expert's rows filled up to a multiple of 16, with a scale for each expert's columns.

The operations state the same to whoever traces them (`megakernels.scratch_bytes`), walked in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megaplan.blocks.ops import BANK, BlockProgram, Op
from megaplan.blocks.storages import Shapes
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.families.moe.program import ARRIVED, INSIDE_BACKWARD, INSIDE_FORWARD
from megaplan.hosts.megarun.scaled_sizes import BY_ROW, MULTIPLE, SCALE, TILE, WHOLE, num_maxima, padded

LOW, SCALES = "experts.low", "experts.low_scales"
INDEX = 4


class Bank(NamedTuple):
    """Sizes of a bank on a rank, and what its operation is given.

    Attributes:
        tokens: Tokens, or rows that arrived.
        slots: Rows of a token.
        experts: Local experts.
        width: Of an expert.
        hidden: Of its input.
        gated: Whether there are three matrices.
        bias: Whether they have biases.
        size: Bytes of an element of activations, and of the gathered weights.
        by_row: Whether rows and columns have scales, and not whole tensors.
        fused: Whether Triton kernels make the copies; what plain torch holds while it makes one is not counted.
        keeps: Whether the input's copy is kept in place of the input.
    """

    tokens: int
    slots: int
    experts: int
    width: int
    hidden: int
    gated: bool
    bias: bool
    size: int
    by_row: bool
    fused: bool
    keeps: bool

    @property
    def rows(self) -> int:
        """Of all experts."""
        return self.tokens * self.slots

    @property
    def columns(self) -> int:
        """Of a transposed copy of rows."""
        return padded(self.rows) + MULTIPLE * self.experts

    @property
    def kept_shape(self) -> tuple[int, int]:
        """The kept copy."""
        return self.hidden, self.columns


def keeps_copy(program: BlockProgram, policy: str) -> bool | None:
    """Whether a block's bank keeps a copy of its input; None if the block has no bank.

    Where selective recompute runs the bank again, its input is kept for that.
    """
    bank = next((op for op in program.ops if op.name == BANK), None)
    return None if bank is None else bank.reads[0] == ARRIVED and policy != "selective"


def bank_in_eight_bits(
    program: BlockProgram,
    shapes: Shapes,
    parameters: Mapping[str, tuple[int, ...]],
    policy: str,
    *,
    by_row: bool,
    fused: bool,
) -> tuple[BlockProgram, Shapes]:
    """The program of a block and its storages with its bank in eight bits, if it has one."""
    keeps = keeps_copy(program, policy)
    if keeps is None:
        return program, shapes
    op = next(op for op in program.ops if op.name == BANK)
    source, given = shapes[op.reads[0]], shapes[op.reads[1]]
    experts, width, hidden = parameters["experts.up_proj"]
    slots = given[2][1] if len(given[2]) > 1 else 1
    bank = Bank(
        given[2][0],
        slots,
        experts,
        width,
        hidden,
        "experts.gate_proj" in op.params,
        "experts.up_proj_bias" in op.params,
        source[3].bytes,
        by_row,
        fused,
        keeps,
    )
    basis = given[4]
    found = dict(shapes)
    found[INSIDE_FORWARD] = _inside(forward_bytes(bank), basis)
    found[INSIDE_BACKWARD] = _inside(backward_bytes(bank), basis)
    if not keeps:
        return program, found
    rows, columns = bank.kept_shape
    num_scales = experts * hidden
    found[LOW] = rows * columns, Column.ACTIVATIONS, bank.kept_shape, DType.FP8, basis
    found[SCALES] = SCALE * num_scales, Column.ACTIVATIONS, (num_scales,), DType.FP32, Basis.EXACT
    return _keeping(program), found


def _keeping(program: BlockProgram) -> BlockProgram:
    """With a bank that keeps the copy; the frame that called it names what arrived until rows have left and come back."""
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


class _Walk:
    """What is alive inside an operation, and the most that was."""

    def __init__(self, bank: Bank) -> None:
        self.bank, self.now, self.peak = bank, 0, 0
        self.make(2 * bank.experts * INDEX)  # where each expert's rows end, as they are and transposed

    def make(self, num_bytes: int, inside: int = 0) -> int:
        self.now += num_bytes
        self.peak = max(self.peak, self.now + inside)
        return num_bytes

    def drop(self, *each: int) -> None:
        self.now -= sum(each)

    def copy_of_rows(self, columns: int, *, gathers: bool = False) -> int:
        """A scale for each; if it gathers, tokens are quantised and their copies gathered."""
        bank = self.bank
        given = bank.tokens if gathers else bank.rows
        if not bank.rows:
            return 0
        data, scale = self.make(given * columns), self._scales(given, columns, given)
        places = 0
        if gathers:
            places = self.make(0 if bank.slots == 1 else INDEX * bank.rows)
            data = self._instead(data, bank.rows * columns)
            scale = self._instead(scale, SCALE * bank.rows) if bank.by_row else scale
        scale = scale if bank.by_row else self._instead(scale, SCALE * bank.rows)
        self.drop(places)
        return data + scale

    def copy_of_matrices(self, rows: int) -> int:
        """Of all as they are, a scale for each of their `rows`."""
        bank, count = self.bank, self.bank.experts * rows
        elements = bank.experts * bank.width * bank.hidden
        data, scale = self.make(elements), self._scales(count, elements // count, count)
        return data + (scale if bank.by_row else self._instead(scale, SCALE * count))

    def turned_rows(self, columns: int, *, gathers: bool = False) -> int:
        """Transposed, a scale for each expert's columns."""
        bank = self.bank
        made = self.make(columns * bank.columns) + self.make(SCALE * bank.experts * columns)
        self._one_scale(bank.tokens if gathers else bank.rows, columns)
        return made

    def turned_matrices(self, columns: int) -> int:
        """Of all, transposed."""
        bank = self.bank
        elements = bank.experts * bank.width * bank.hidden
        ends = self.make(2 * bank.experts * INDEX)
        made = self.make(elements) + self.make(SCALE * bank.experts * columns)
        self._one_scale(elements // columns, columns)
        self.drop(ends)
        return made

    def summed(self, products: int) -> int:
        """Each token's rows, which are dropped."""
        bank = self.bank
        made = self.make(bank.tokens * bank.hidden * bank.size)
        self.drop(self.make(INDEX * bank.rows if bank.fused else 0), products)
        return made

    def biases(self) -> int:
        """Their gradients; while that of `down` is made, the shares of the weights' gradient, and then their sum."""
        bank = self.bank
        if not bank.bias:
            return 0
        made = sum(self.make(bank.experts * bank.width * bank.size) for _ in range(1 + bank.gated))
        shares = self.make(-(-bank.hidden // TILE) * bank.rows * SCALE if bank.fused else 0)
        made += self.make(bank.experts * bank.hidden * bank.size)
        self.drop(shares, self.make(bank.rows * SCALE if bank.fused else 0))
        return made

    def _instead(self, old: int, new: int) -> int:
        self.make(new)
        self.drop(old)
        return new

    def _scales(self, rows: int, columns: int, count: int) -> int:
        return self.make(SCALE * (count if self.bank.by_row else 1), self._maxima(rows, columns))

    def _one_scale(self, rows: int, columns: int) -> None:
        if not self.bank.by_row:
            self.drop(self.make(SCALE, self._maxima(rows, columns)))

    def _maxima(self, rows: int, columns: int) -> int:
        return SCALE * num_maxima(rows, columns, BY_ROW if self.bank.by_row else WHOLE) if self.bank.fused else 0


def forward_bytes(bank: Bank) -> int:
    """Inside forward, in addition to all results."""
    walk, inner = _Walk(bank), bank.rows * bank.width * bank.size
    made = walk.turned_rows(bank.hidden, gathers=True) if bank.keeps else 0
    first = walk.copy_of_rows(bank.hidden, gathers=True)
    for _ in range(1 + bank.gated):
        second = walk.copy_of_matrices(bank.width)
        made += walk.make(inner)
        walk.drop(second)
    walk.drop(first)
    hidden = walk.make(inner)
    first = walk.copy_of_rows(bank.width)
    walk.drop(hidden)
    second = walk.copy_of_matrices(bank.hidden)
    products = walk.make(bank.rows * bank.hidden * bank.size)
    walk.drop(first, second)
    made += walk.summed(products)
    return walk.peak - made


def backward_bytes(bank: Bank) -> int:
    """Inside backward, in addition to all gradients."""
    walk, inner, matrix = _Walk(bank), bank.rows * bank.width * bank.size, bank.experts * bank.width * bank.hidden * bank.size
    first, second = walk.copy_of_rows(bank.hidden, gathers=True), walk.turned_matrices(bank.width)
    pulled = walk.make(inner)
    walk.drop(first, second)
    gradients, hidden = [walk.make(inner) for _ in range(1 + bank.gated)], walk.make(inner)
    made = walk.make(bank.rows * SCALE)
    walk.drop(pulled)
    second = walk.turned_rows(bank.width)
    walk.drop(hidden)
    first = walk.turned_rows(bank.hidden, gathers=True)
    made += walk.make(matrix)
    walk.drop(first, second)
    made += walk.biases()
    products = 0
    for index in range(1 + bank.gated):
        first, second = walk.copy_of_rows(bank.width), walk.turned_matrices(bank.hidden)
        again = walk.make(bank.rows * bank.hidden * bank.size)
        walk.drop(first, second, again if index else 0)
        products = products or again
    made += walk.summed(products)
    if not bank.keeps:
        walk.turned_rows(bank.hidden, gathers=True)
    for gradient in gradients:
        first = walk.turned_rows(bank.width)
        made += walk.make(matrix)
        walk.drop(first, gradient)
    return walk.peak - made
