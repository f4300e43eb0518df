"""Bytes that the products hold inside themselves on CUDA: eight-bit copies, what making one holds, and results with padded columns."""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import chooses_triton
from megakernels.ops.fp8_linear.reference import padded, slice_rows

SCALE = 4
TILE = 128
"""Rows and columns of a tile of the Triton kernels."""
WHOLE, BY_ROW, BY_COLUMN = 0, 1, 2
"""What has a scale, of the matrix as it is given."""


def num_maxima(rows: int, columns: int, scaled: int) -> int:
    """Maxima that the Triton kernels hold between their passes: of each tile or, scaled by row or by column, its rows or columns."""
    down, across = -(-rows // TILE), -(-columns // TILE)
    return (down * across, rows * across, columns * down)[scaled]


def copy_bytes(rows: int, columns: int, by_row: bool) -> int:
    """Of a copy with its scales, dims as they are stored."""
    return rows * columns + SCALE * (rows if by_row else 1)


def making_bytes(x: Tensor, rows: int, columns: int, scaled: int) -> int:
    """Inside the making of a copy of x [rows, columns]: the maxima of tiles, or in plain torch the slice that is scaled and the factors."""
    if chooses_triton(x) and dense_rows(x):
        return SCALE * num_maxima(rows, columns, scaled)
    return (slice_rows(rows, columns) * columns + (1, rows, columns)[scaled]) * x.itemsize


def dense_rows(x: Tensor) -> bool:
    """Whether the kernels read this matrix: rows with dense elements."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def quantize_scratch(x: Tensor, scaling: str) -> int:
    """Of `fp8_quantize`."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    return making_bytes(x, rows, columns, BY_COLUMN if scaling == "columns" else WHOLE)


def linears_scratch(x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], _biases: object, scaling: str) -> int:
    """Of `fp8_linears`: the input's copy unless it is given, and one weight's at a time."""
    by_row, width, size = scaling == "rows", weights[0].shape[1], weights[0].itemsize
    along = BY_ROW if by_row else WHOLE
    rows = x.numel() // x.shape[-1]
    own, peak = 0, 0
    if scale is None:
        own = copy_bytes(rows, padded(width), by_row)
        peak = own + making_bytes(x, rows, width, along)
    for weight in weights:
        out = weight.shape[0]
        copy = own + copy_bytes(padded(out), padded(width), by_row)
        result = rows * padded(out) * size if padded(out) != out else 0
        peak = max(peak, copy + max(making_bytes(weight, out, width, along), result))
    return peak


def input_gradients_scratch(gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, _gradient_format: str) -> int:
    """Of `fp8_input_gradients`: copies of one gradient and its weight at a time, and from the second on their product."""
    by_row, width, size = scaling == "rows", weights[0].shape[1], weights[0].itemsize
    along, across = (BY_ROW, BY_COLUMN) if by_row else (WHOLE, WHOLE)
    peak = 0
    for index, weight in enumerate(weights):
        out = weight.shape[0]
        rows = gradients[index].numel() // out
        first = copy_bytes(rows, padded(out), by_row)
        both = first + copy_bytes(padded(width), padded(out), by_row)
        result = rows * size * ((padded(width) if padded(width) != width else 0) + (width if index else 0))
        scaled = making_bytes(weight, out, width, across)
        peak = max(peak, first + making_bytes(gradients[index], rows, out, along), both + max(scaled, result))
    return peak


def weight_gradients_scratch(
    gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None, width: int, scaling: str, _gradient_format: str, _biases: object
) -> int:
    """Of `fp8_weight_gradients`: the input's transposed copy, and one gradient's at a time."""
    by_row, size = scaling == "rows", gradients[0].itemsize
    across = BY_COLUMN if by_row else WHOLE
    rows = x.numel() // x.shape[-1]
    own = padded(width) * padded(rows) if scale is not None else copy_bytes(padded(width), padded(rows), by_row)
    peak = own if scale is not None else own + making_bytes(x, rows, width, across)
    for gradient in gradients:
        out = gradient.shape[-1]
        copy = own + copy_bytes(out, padded(rows), by_row)
        result = out * padded(width) * size if padded(width) != width else 0
        peak = max(peak, copy + max(making_bytes(gradient, rows, out, across), result))
    return peak
