"""Facts of a bank of experts in eight bits: copies of rows and matrices, operations between products, and grouped products.

Rows are quantised once a token and their copies gathered; each kind of matrices is quantised once for all experts, and once more in
backward, by its columns and transposed. Triton kernels have the same number of launches for any number of experts; plain torch transposes
each expert's rows and matrix separately. A transposed copy has each expert's rows at a column that 16 divides, and 16 columns for an expert
without rows.

On one rank a bank keeps the tokens, and quantises them again in backward. Rows that arrived from other ranks are kept as the transposed
copy that the weight gradients multiply, with a scale for each expert's columns.
"""

from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, KernelScratch, Pass, ceil_div
from megakernels.ops.fp8_linear.facts import (
    BY_ROW,
    GIVEN,
    MULTIPLE,
    NOTHING,
    SCALE_BYTES,
    VALUE_BYTES,
    WHOLE,
    ScaledPass,
    ScaledPasses,
    copy_pass,
    num_maxima,
    padded,
    summed,
)
from megakernels.ops.moe.facts import BIAS_COLS, ExpertSizes

INDEX = 4
"""Bytes of an index."""
GROUPS_LAUNCHES = 6
"""Kernels that find where each expert's rows end, as they are and in a transposed copy."""
PLAIN_TURNED = {True: (2, 13), False: (9, 6)}
"""Launches of a transposed copy in plain torch, with scales of columns or with one: once, and for each expert."""
PLAIN_GIVEN = (3, 6)
"""The same with a given scale."""
PLAIN_BETWEEN = {True: ((29, 11), (99, 51)), False: ((18, 8), (54, 37))}
"""Passes over the activations and launches between products in plain torch, with a gate or without, forward and backward."""
PLAIN_BIASES = ((16, 20, 8), (5, 21, 6))
"""Biases in plain torch: passes over a first product, over the last one, and launches of each; backward also sums each expert's rows."""
TURNED_TILE = {"ROWS": 64, "SIDE": 128, "num_warps": 8}
"""Tile of a transposed copy."""
BETWEEN_TILE = {"ROWS": 16, "COLS": 128, "num_warps": 4}
"""Tile between two products."""


class ScaledBank(NamedTuple):
    """A bank on a rank, and the inputs of its operation.

    Attributes:
        sizes: Sizes of the bank.
        by_row: True if scales are per row and column instead of per tensor.
        fused: True if Triton kernels make the copies; scratch of plain torch's copies is not counted.
        keeps: True if the input's copy is kept in place of the input.
        emulated: True if operands are values in fp32, without scales.
        packed: True for gate and up, and for down, if they are given packed.
        delayed: True if scales are per tensor and given.
    """

    sizes: ExpertSizes
    by_row: bool
    fused: bool
    keeps: bool
    emulated: bool = False
    packed: tuple[bool, bool] = (False, False)
    delayed: bool = False

    @property
    def kept_shape(self) -> tuple[int, int]:
        """Shape of the kept copy."""
        return self.sizes.hidden, turned_columns(self.sizes.rows, self.sizes.experts)

    def inside(self, biases: tuple[int, int, int]) -> KernelScratch:
        """Bytes inside both directions; `biases`: bytes of the gradients of the biases of gate, up and down."""
        return KernelScratch(self.forward_bytes(), self.backward_bytes(biases))

    def forward_bytes(self) -> int:
        """Bytes inside the forward, in addition to all results."""
        walk, bank = _Walk(self), self.sizes
        inner = bank.rows * bank.width * bank.itemsize
        made = walk.turned_rows(bank.hidden, gathers=True) if self.keeps else 0
        first = walk.copy_of_rows(bank.hidden, gathers=True)
        for _ in range(1 + bank.gated):
            second = walk.copy_of_matrices(bank.width, self.packed[0])
            made += walk.make(inner)
            walk.drop(second)
        walk.drop(first)
        hidden = walk.make(inner)
        first = walk.copy_of_rows(bank.width)
        walk.drop(hidden)
        second = walk.copy_of_matrices(bank.hidden, self.packed[1])
        products = walk.make(bank.rows * bank.hidden * bank.itemsize)
        walk.drop(first, second)
        made += walk.summed(products)
        return walk.peak - made

    def backward_bytes(self, biases: tuple[int, int, int]) -> int:
        """Bytes inside the backward, in addition to all gradients; `biases`: bytes of those of the biases of gate, up and down."""
        walk, bank = _Walk(self), self.sizes
        inner, matrix = bank.rows * bank.width * bank.itemsize, bank.matrices * bank.itemsize
        first, second = walk.copy_of_rows(bank.hidden, gathers=True), walk.turned_matrices(bank.width, self.packed[1])
        pulled = walk.make(inner)
        walk.drop(first, second)
        gradients, hidden = [walk.make(inner) for _ in range(1 + bank.gated)], walk.make(inner)
        made = walk.make(bank.rows * SUMS_BYTES)
        walk.drop(pulled)
        second = walk.turned_rows(bank.width)
        walk.drop(hidden)
        first = walk.turned_rows(bank.hidden, gathers=True)
        made += walk.make(matrix)
        walk.drop(first, second)
        made += walk.biases(biases)
        products = 0
        for index in range(1 + bank.gated):
            first, second = walk.copy_of_rows(bank.width), walk.turned_matrices(bank.hidden, self.packed[0])
            second_copy = walk.make(bank.rows * bank.hidden * bank.itemsize)
            walk.drop(first, second, second_copy if index else 0)
            products = products or second_copy
        made += walk.summed(products)
        if not self.keeps:
            walk.turned_rows(bank.hidden, gathers=True)
        for gradient in gradients:
            first = walk.turned_rows(bank.width)
            made += walk.make(matrix)
            walk.drop(first, gradient)
        return walk.peak - made


class ScaledBankCost(NamedTuple):
    """Bytes, products and launches of the passes of a bank.

    Attributes:
        sizes: Sizes of the bank; its tokens are the input's, or received rows.
        rows: Rows of all experts, on the busiest rank.
        by_row: True if rows and columns have scales.
        fused: True if Triton kernels make the copies.
        travels: True if rows arrived from other ranks.
        keeps: True if the input's copy is kept in place of the input.
        products: Launches of one product of groups: one where torch has it for these dtypes, else one per expert.
        packed: True for gate and up, and for down, if they are given packed.
        delayed: True if scales are per tensor and given.
    """

    sizes: ExpertSizes
    rows: int
    by_row: bool
    fused: bool
    travels: bool
    keeps: bool
    products: int
    packed: tuple[bool, bool] = (False, False)
    delayed: bool = False

    def passes(self, gradient_bytes: int) -> ScaledPasses:
        """Forward, and backward with the gradients of the matrices; `gradient_bytes`: bytes moved by the sums of these gradients.

        Sums over a token's slots are dispatch and combine, except of rows that travelled, which one more kernel puts back in their order.
        """
        return self._forward(), self._backward(gradient_bytes), ScaledPass(NOTHING, NOTHING)

    def _forward(self) -> ScaledPass:
        bank, rows, given, first = self.sizes, self.rows, self.sizes.tokens, 1 + self.sizes.gated
        inner, outer, elements, size = rows * bank.width, rows * bank.hidden, bank.matrices, bank.itemsize
        copies = [
            Pass(0, 0, GROUPS_LAUNCHES),
            *([self._turned_rows(given, rows, bank.hidden)] if self.keeps else ()),
            self._gathered(given, rows, bank.hidden),
            *(self._stacked(elements, bank.hidden, self.packed[0]) for _ in range(first)),
            self._between(inner, outer, first, 0),
            self._copy(inner, bank.width),
            self._stacked(elements, bank.width, self.packed[1]),
            *self._put_back(outer),
        ]
        num_bytes = first * (outer + elements + inner * size) + inner + elements + outer * size
        return ScaledPass(summed(*copies), Pass(num_bytes, 2 * (first + 1) * inner * bank.hidden, (first + 1) * self.products))

    def _backward(self, gradient_bytes: int) -> ScaledPass:
        bank, rows, given, first = self.sizes, self.rows, self.sizes.tokens, 1 + self.sizes.gated
        inner, outer, elements, size = rows * bank.width, rows * bank.hidden, bank.matrices, bank.itemsize
        each = (self._copy(inner, bank.width), self._turned_bank(elements, self.packed[0]), self._turned_rows(rows, rows, bank.width))
        copies = [
            Pass(0, 0, GROUPS_LAUNCHES),
            self._gathered(given, rows, bank.hidden),
            self._turned_bank(elements, self.packed[1]),
            self._between(inner, outer, first, 1),
            self._turned_rows(rows, rows, bank.width),
            self._turned_rows(given, rows, bank.hidden),
            *(each * first),
            *([Pass(3 * outer * size, 0, 1)] if first > 1 else ()),
            *self._put_back(outer),
            *(() if self.keeps else [self._turned_rows(given, rows, bank.hidden)]),
        ]
        inputs = (first + 1) * (inner + outer + elements) + inner * size + first * outer * size
        outers = (first + 1) * (inner + outer + elements * size) + gradient_bytes
        return ScaledPass(summed(*copies), Pass(inputs + outers, 4 * (first + 1) * inner * bank.hidden, 2 * (first + 1) * self.products))

    @property
    def _scaled(self) -> int:
        return BY_ROW if self.by_row else GIVEN if self.delayed else WHOLE

    def _copy(self, elements: int, columns: int) -> Pass:
        """The untransposed copy of a matrix, with one scale per row."""
        made = copy_pass(elements, columns, self.sizes.itemsize, self._scaled, fused=self.fused)
        return made if self.by_row else made._replace(launches=made.launches + 1)

    def _gathered(self, given: int, rows: int, columns: int) -> Pass:
        """The copy of tokens, whose eight-bit rows are gathered with their scales."""
        made, several = copy_pass(given * columns, columns, self.sizes.itemsize, self._scaled, fused=self.fused), rows > given
        return Pass(made.num_bytes + 2 * rows * columns, 0, made.launches + 2 + several)

    def _turned_rows(self, given: int, rows: int, columns: int) -> Pass:
        """The transposed copy of each expert's rows; in plain torch they are gathered in 16 bits before."""
        elements = rows * columns
        made = self._turned(elements, elements if self.by_row else 0 if self.delayed and self.fused else given * columns)
        return made if self.fused or given == rows else summed(made, Pass(2 * elements * self.sizes.itemsize, 0, 2))

    def _stacked(self, elements: int, columns: int, packed: bool) -> Pass:
        """The copy of all matrices; packed ones are multiplied directly, or copied without the scales between their rows."""
        if not packed:
            return self._copy(elements, columns)
        return Pass(2 * elements, 0, 1) if self.by_row else NOTHING

    def _turned_bank(self, elements: int, packed: bool) -> Pass:
        """The transposed copy of each expert's matrix."""
        if packed:
            return Pass(2 * elements, 0, 1)
        made = self._turned(elements, 0 if self.delayed and self.fused else elements)
        return made._replace(launches=made.launches + 2)

    def _turned(self, elements: int, looked_at: int) -> Pass:
        """A transposed copy; `looked_at` are the elements among which the largest is found."""
        size = self.sizes.itemsize
        if self.fused:
            return Pass(elements * (size + 1) + looked_at * size, 0, 1 if self.by_row or self.delayed else 3)
        if self.delayed:  # each input is multiplied, clamped and rounded in fp32
            launches, of_each = PLAIN_GIVEN
            num_bytes = elements * (size + 4 * VALUE_BYTES + 2) + looked_at * size
            return Pass(num_bytes, 0, launches + of_each * self.sizes.experts)
        launches, of_each = PLAIN_TURNED[self.by_row]
        return Pass(elements * (3 * size + 2) + looked_at * 3 * size, 0, launches + of_each * self.sizes.experts)

    def _between(self, inner: int, outer: int, first: int, direction: int) -> Pass:
        """Activation, weights and biases forward, or backward their gradients."""
        size = self.sizes.itemsize
        if self.fused:
            passes, launches = inner * (first + 1) * (1, 2)[direction], 1
            if self.sizes.bias:
                passes, launches = passes + outer + direction * first * inner, launches + (1, 3 + first)[direction]
            return Pass(passes * size, 0, launches)
        times, launches = PLAIN_BETWEEN[first > 1][direction]
        passes = inner * times
        if self.sizes.bias:
            of_first, of_last, each = PLAIN_BIASES[direction]
            passes += first * inner * of_first + outer * of_last
            launches += (first + 1) * (each + direction * self.sizes.experts) + direction * 25
        return Pass(passes * size, 0, launches)

    def _put_back(self, outer: int) -> tuple[Pass, ...]:
        return (Pass(2 * outer * self.sizes.itemsize, 0, 2),) if self.travels else ()


def turned_columns(num_rows: int, num_experts: int) -> int:
    """Columns of a transposed copy of sorted rows: a bound that needs no counts."""
    return padded(num_rows) + MULTIPLE * num_experts


class _Walk:
    """Bytes allocated inside an operation, and their peak, in the order of `run`."""

    def __init__(self, given: ScaledBank) -> None:
        self.given, self.bank, self.now, self.peak = given, given.sizes, 0, 0
        self.columns = given.kept_shape[1]
        self.size, self.scale = (VALUE_BYTES, 0) if given.emulated else (1, SCALE_BYTES)
        self.make(2 * self.bank.experts * INDEX)  # the ends of the experts' rows, for the rows and for their transpose

    def make(self, num_bytes: int, inside: int = 0) -> int:
        """Allocates a result; `inside` bytes more are held while it is computed."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now + inside)
        return num_bytes

    def drop(self, *each: int) -> None:
        """Frees bytes."""
        self.now -= sum(each)

    def copy_of_rows(self, columns: int, *, gathers: bool = False) -> int:
        """A copy of rows with a scale for each; if it gathers, tokens are quantised and their copies gathered."""
        bank, by_row = self.bank, self.given.by_row
        given = bank.tokens if gathers else bank.rows
        if not bank.rows:
            return 0
        data, scale = self.make(given * columns * self.size), self._scales(given, columns, given)
        places = 0
        if gathers:
            places = self.make(0 if bank.slots == 1 else INDEX * bank.rows)
            data = self._instead(data, bank.rows * columns * self.size)
            scale = self._instead(scale, SCALE_BYTES * bank.rows) if by_row and not self.given.emulated else scale
        scale = scale if by_row or self.given.emulated else self._instead(scale, SCALE_BYTES * bank.rows)
        self.drop(places)
        return data + scale

    def copy_of_matrices(self, rows: int, packed: bool) -> int:
        """A copy of all matrices as they are, with a scale for each of their `rows`; of packed ones with a scale in common the scales."""
        count, elements = self.bank.experts * rows, self.bank.matrices
        if packed and not self.given.emulated:
            data = self.make(elements * self.size) if self.given.by_row else 0
            return data + self._instead(0 if self.given.by_row else self.make(SCALE_BYTES), SCALE_BYTES * count)
        data, scale = self.make(elements * self.size), self._scales(count, elements // count, count)
        return data + (scale if self.given.by_row or self.given.emulated else self._instead(scale, SCALE_BYTES * count))

    def turned_rows(self, columns: int, *, gathers: bool = False) -> int:
        """A transposed copy of rows, with a scale for each expert's columns."""
        bank = self.bank
        made = self.make(columns * self.columns * self.size) + self.make(self.scale * bank.experts * columns)
        self._one_scale(bank.tokens if gathers else bank.rows, columns)
        return made

    def turned_matrices(self, columns: int, packed: bool) -> int:
        """A transposed copy of all matrices."""
        ends = self.make(0 if self.given.emulated or packed else 2 * self.bank.experts * INDEX)
        made = self.make(self.bank.matrices * self.size) + self.make(self.scale * self.bank.experts * columns)
        if not packed:
            self._one_scale(self.bank.matrices // columns, columns)
        self.drop(ends)
        return made

    def summed(self, products: int) -> int:
        """The sum of each token's rows, which are dropped."""
        bank = self.bank
        made = self.make(bank.tokens * bank.hidden * bank.itemsize)
        self.drop(self.make(INDEX * bank.rows if self.given.fused else 0), products)
        return made

    def biases(self, each: tuple[int, int, int]) -> int:
        """The biases' gradients; during the one of `down` also the shares of the weights' gradient, and then their sum."""
        bank, fused = self.bank, self.given.fused
        *others, down = each
        made = sum(self.make(num_bytes) for num_bytes in others)
        if down:
            shares = self.make(ceil_div(bank.hidden, BIAS_COLS) * bank.rows * SCALE_BYTES if fused else 0)
            made += self.make(down)
            self.drop(shares, self.make(bank.rows * SUMS_BYTES if fused else 0))
        return made

    def _instead(self, old: int, new: int) -> int:
        self.make(new)
        self.drop(old)
        return new

    def _scales(self, rows: int, columns: int, count: int) -> int:
        return 0 if self.given.emulated else self.make(SCALE_BYTES * (count if self.given.by_row else 1), self._maxima(rows, columns))

    def _one_scale(self, rows: int, columns: int) -> None:
        if not self.given.by_row and not self.given.emulated and not self.given.delayed:
            self.drop(self.make(SCALE_BYTES, self._maxima(rows, columns)))

    def _maxima(self, rows: int, columns: int) -> int:
        scaled = BY_ROW if self.given.by_row else GIVEN if self.given.delayed else WHOLE
        return SCALE_BYTES * num_maxima(rows, columns, scaled) if self.given.fused else 0
