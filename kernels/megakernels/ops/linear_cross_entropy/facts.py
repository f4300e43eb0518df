"""Facts of head and loss as one operation: slices of the vocabulary, of which one slice of logits exists at a time."""

from typing import NamedTuple

from megakernels.facts import ceil_div
from megakernels.ops.fp8_linear.facts import VALUE_BYTES, Operands

LOGITS_SLICE_ELEMENTS = 1 << 27
"""Largest number of logits at a time: 256 MiB in bf16."""
WHOLE_BLOCKS = 128
"""Divisor of the columns of a slice in a recipe's format: the columns of the largest block of scales."""


def slice_columns(rows: int, vocab: int, *, scaled: bool = False) -> int:
    """Columns of the vocabulary whose logits exist at a time."""
    columns = max(1, LOGITS_SLICE_ELEMENTS // max(1, rows))
    return min(vocab, max(1, columns // WHOLE_BLOCKS) * WHOLE_BLOCKS if scaled else columns)


def num_slices(rows: int, vocab: int, *, scaled: bool = False) -> int:
    """Slices of the vocabulary."""
    return ceil_div(vocab, slice_columns(rows, vocab, scaled=scaled))


class ScaledHead(NamedTuple):
    """A head in a recipe's format and its loss.

    Attributes:
        rows: Rows of logits.
        hidden: Width of the rows that the head multiplies.
        vocab: Columns of logits.
        itemsize: Bytes of an element.
        scaling: Scaling of `fp8_linears`.
        fused: True if Triton kernels make the copies.
    """

    rows: int
    hidden: int
    vocab: int
    itemsize: int
    scaling: str
    fused: bool

    @property
    def forward_bytes(self) -> int:
        """Bytes inside the forward, without numbers per row."""
        first, making = self._operands.one(self.rows, self.hidden)
        return max(first + making, *[first + self._logits(words) for words in self._slices])

    @property
    def backward_bytes(self) -> int:
        """Bytes inside the backward, in addition to both gradients."""
        first, making = self._operands.one(self.rows, self.hidden)
        columns, turning = self._operands.one(self.hidden, self.rows, second=True, transposed=True)
        total = self.rows * self.hidden * VALUE_BYTES
        peak = max(columns + turning, columns + first + making)
        for words in self._slices:
            peak = max(peak, columns + first + total + max(self._logits(words), self._gradients(words)))
        return peak - self.rows * self.hidden * self.itemsize

    @property
    def _operands(self) -> Operands:
        return Operands(self.scaling, self.itemsize, self.fused)

    @property
    def _slices(self) -> set[int]:
        """Widths of slices: of all except the last, and of the last."""
        words = slice_columns(self.rows, self.vocab, scaled=True)
        return {words, self.vocab % words or words}

    def _logits(self, words: int) -> int:
        second, making = self._operands.one(words, self.hidden, second=True)
        return self.rows * words * self.itemsize + second + max(making, self._operands.product_bytes(self.rows, words, self.itemsize))

    def _gradients(self, words: int) -> int:
        """Logits, and the products of their gradient, one after the other."""
        one, product_bytes = self._operands.one, self._operands.product_bytes
        first, making = one(self.rows, words, gradient=True)
        second, turning = one(self.hidden, words, second=True, transposed=True)
        product = 0 if self._operands.emulated else self.rows * self.hidden * VALUE_BYTES
        product += 0 if self._operands.emulated else product_bytes(self.rows, self.hidden, VALUE_BYTES)
        of_rows = max(first + making, first + second + max(turning, product))
        first, making = one(words, self.rows, transposed=True, gradient=True)
        of_weight = first + max(making, product_bytes(words, self.hidden, self.itemsize))
        return self.rows * words * self.itemsize + max(of_rows, of_weight)
