"""Bytes of megarun's linears in eight bits: copies that are kept, and what one product holds inside itself.

The operations state the same to whoever traces them (`megakernels.scratch_bytes`).
"""

from __future__ import annotations

from typing import NamedTuple

MULTIPLE = 16
SLICE_ELEMENTS = 1 << 22
SCALE = 4
TILE = 128
WHOLE, BY_ROW, BY_COLUMN = 0, 1, 2
"""What has a scale, of a matrix as it is given."""


class Product(NamedTuple):
    """Several linears of one input.

    Attributes:
        rows: Tokens that they multiply.
        width: Of the input.
        outs: Widths of the outputs.
        size: Bytes of an element of activations, and of the gathered weights.
        by_row: Whether rows and columns have scales, and not whole matrices.
        fused: Whether Triton kernels make the copies; plain torch scales a slice of the matrix at once.
    """

    rows: int
    width: int
    outs: tuple[int, ...]
    size: int
    by_row: bool
    fused: bool

    def kept_shape(self, rows: int) -> tuple[int, int]:
        """The kept copy of `rows` tokens."""
        return rows, padded(self.width)

    @property
    def num_scales(self) -> int:
        """Scales of the kept copy: of the columns that the weight gradient's product has, or one."""
        return padded(self.width) if self.by_row else 1

    def keeping_bytes(self, rows: int) -> int:
        """Inside the operation that makes the kept copy of `rows` tokens."""
        return self._making(rows, self.width, BY_COLUMN)

    def forward_bytes(self, *, given: bool) -> int:
        """Inside the products, where the input's copy is given or made inside."""
        own = peak = 0
        if not given:
            own = self._copy(self.rows, padded(self.width))
            peak = own + self._making(self.rows, self.width, BY_ROW)
        for out in self.outs:
            copy = own + self._copy(padded(out), padded(self.width))
            result = self.rows * padded(out) * self.size if padded(out) != out else 0
            peak = max(peak, copy + max(self._making(out, self.width, BY_ROW), result))
        return peak

    @property
    def input_gradient_bytes(self) -> int:
        """Inside the products that make the input's gradient."""
        return max(self._input_gradient(index, out) for index, out in enumerate(self.outs))

    def _input_gradient(self, index: int, out: int) -> int:
        first = self._copy(self.rows, padded(out))
        both = first + self._copy(padded(self.width), padded(out))
        widths = (padded(self.width) if padded(self.width) != self.width else 0) + (self.width if index else 0)
        scaled = self._making(out, self.width, BY_COLUMN)
        return max(first + self._making(self.rows, out, BY_ROW), both + max(scaled, self.rows * widths * self.size))

    def weight_gradient_bytes(self, *, given: bool) -> int:
        """Inside the products that make the weights' gradients, where the input's kept copy is given or its copy made inside."""
        own = padded(self.width) * padded(self.rows) if given else self._copy(padded(self.width), padded(self.rows))
        peak = own if given else own + self._making(self.rows, self.width, BY_COLUMN)
        for out in self.outs:
            copy = own + self._copy(out, padded(self.rows))
            result = out * padded(self.width) * self.size if padded(self.width) != self.width else 0
            peak = max(peak, copy + max(self._making(self.rows, out, BY_COLUMN), result))
        return peak

    def _copy(self, rows: int, columns: int) -> int:
        return rows * columns + SCALE * (rows if self.by_row else 1)

    def _making(self, rows: int, columns: int, scaled: int) -> int:
        """Inside the making of a copy: the maxima of tiles, or the rows that are scaled at once and the factors in their dtype."""
        scaled = scaled if self.by_row else WHOLE
        if self.fused:
            return SCALE * num_maxima(rows, columns, scaled)
        at_once = min(rows, max(1, SLICE_ELEMENTS // max(columns, 1)))
        return (at_once * columns + (1, rows, columns)[scaled]) * self.size


def num_maxima(rows: int, columns: int, scaled: int) -> int:
    """Largest magnitudes that the kernels hold while they make a copy: of each tile, or of its rows or columns."""
    down, across = -(-rows // TILE), -(-columns // TILE)
    return (down * across, rows * across, columns * down)[scaled]


def padded(size: int) -> int:
    """The next multiple of what torch's scaled product takes."""
    return -(-size // MULTIPLE) * MULTIPLE
