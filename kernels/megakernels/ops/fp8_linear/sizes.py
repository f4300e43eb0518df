"""Bytes that the products hold inside themselves on CUDA: eight-bit copies, slices being scaled, and results with padded columns."""

from collections.abc import Sequence

from torch import Tensor

from megakernels.ops.fp8_linear.reference import padded, slice_rows

SCALE = 4


def copy_bytes(rows: int, columns: int, by_row: bool) -> int:
    """Of a copy with its scales, dims as they are stored."""
    return rows * columns + SCALE * (rows if by_row else 1)


def slice_bytes(rows: int, columns: int, num_factors: int, size: int) -> int:
    """Of the slice that is scaled at once, and of the factors in its dtype."""
    return (slice_rows(rows, columns) * columns + num_factors) * size


def quantize_scratch(x: Tensor, scaling: str) -> int:
    """Of `fp8_quantize`."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    return slice_bytes(rows, columns, columns if scaling == "columns" else 1, x.itemsize)


def linears_scratch(x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], _biases: object, scaling: str) -> int:
    """Of `fp8_linears`: the input's copy unless it is given, and one weight's at a time."""
    by_row, width, size = scaling == "rows", weights[0].shape[1], weights[0].itemsize
    rows = x.numel() // x.shape[-1]
    own, peak = 0, 0
    if scale is None:
        own = copy_bytes(rows, padded(width), by_row)
        peak = own + slice_bytes(rows, width, rows if by_row else 1, size)
    for weight in weights:
        out = weight.shape[0]
        copy = own + copy_bytes(padded(out), padded(width), by_row)
        result = rows * padded(out) * size if padded(out) != out else 0
        peak = max(peak, copy + max(slice_bytes(out, width, out if by_row else 1, size), result))
    return peak


def input_gradients_scratch(gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, _gradient_format: str) -> int:
    """Of `fp8_input_gradients`: copies of one gradient and its weight at a time, and from the second on their product."""
    by_row, width, size = scaling == "rows", weights[0].shape[1], weights[0].itemsize
    peak = 0
    for index, weight in enumerate(weights):
        out = weight.shape[0]
        rows = gradients[index].numel() // out
        first = copy_bytes(rows, padded(out), by_row)
        both = first + copy_bytes(padded(width), padded(out), by_row)
        result = rows * size * ((padded(width) if padded(width) != width else 0) + (width if index else 0))
        scaled = slice_bytes(out, width, width if by_row else 1, size)
        peak = max(peak, first + slice_bytes(rows, out, rows if by_row else 1, size), both + max(scaled, result))
    return peak


def weight_gradients_scratch(
    gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None, width: int, scaling: str, _gradient_format: str, _biases: object
) -> int:
    """Of `fp8_weight_gradients`: the input's transposed copy, and one gradient's at a time."""
    by_row, size = scaling == "rows", gradients[0].itemsize
    rows = x.numel() // x.shape[-1]
    own = padded(width) * padded(rows) if scale is not None else copy_bytes(padded(width), padded(rows), by_row)
    peak = own if scale is not None else own + slice_bytes(rows, width, width if by_row else 1, size)
    for gradient in gradients:
        out = gradient.shape[-1]
        copy = own + copy_bytes(out, padded(rows), by_row)
        result = out * padded(width) * size if padded(width) != width else 0
        peak = max(peak, copy + max(slice_bytes(rows, out, out if by_row else 1, size), result))
    return peak
