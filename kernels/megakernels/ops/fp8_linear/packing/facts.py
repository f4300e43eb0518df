"""Facts of weights that are packed by shards for a gather (`fp8_linear.weights`): conditions, bytes, and scratch of packing."""

from math import prod

from megakernels.facts import ceil_div
from megakernels.ops.fp8_linear.facts import (
    BLOCKS,
    DELAYED,
    INDEX_BYTES,
    MULTIPLE,
    SCALE_BYTES,
    SQUARE_ROWS,
    VALUE_BYTES,
    BlockLinears,
    rounded_up,
    slice_rows,
)

PACKED_ROWS = {"tensor": 1, "rows": 1, DELAYED: 1, "mxfp8": 32, "nvfp4": 16, "fp8_blockwise": 1}
PACKED_COLUMNS = {"tensor": MULTIPLE, "rows": MULTIPLE, DELAYED: MULTIPLE, "mxfp8": 32, "nvfp4": 16, "fp8_blockwise": MULTIPLE}
"""Divisors of the rows of a shard, and of its columns, by the scalings whose weights can be packed."""
TWO_FORMS = frozenset({"rows", "mxfp8"})
"""Scalings whose packed weights are others for the gradient of the input than for the forward."""
OWN_LARGEST = frozenset({"rows", "nvfp4", "fp8_blockwise"})
"""Scalings of a bank of matrices of which each has its own largest magnitudes, not the bank."""
PACKED_SLICE = 32
"""Divisor of the rows of a shard that are packed at once."""


def packs(rows: int, columns: int, scaling: str) -> bool:
    """True if a shard of a weight with this shape has whole blocks of scales, so that it can be packed."""
    return rows % PACKED_ROWS[scaling] == 0 and columns % PACKED_COLUMNS[scaling] == 0


def packed_columns(columns: int, scaling: str) -> int:
    """Bytes of a packed row of a weight."""
    return columns * _parts(scaling)[0] // _parts(scaling)[1] + _row_bytes(scaling)


def unpacked_columns(num_bytes: int, scaling: str) -> int:
    """Columns of a weight whose packed rows have this many bytes."""
    return (num_bytes - _row_bytes(scaling)) * _parts(scaling)[1] // _parts(scaling)[0]


def num_largest(rows: int, columns: int, scaling: str) -> int:
    """Largest magnitudes of a whole weight that the packing of its shards needs: one, one per column, or one per block."""
    return {"mxfp8": 0, DELAYED: 0, "rows": columns, "fp8_blockwise": prod(squares(rows, columns))}.get(scaling, 1)


def squares(rows: int, columns: int) -> tuple[int, int]:
    """Blocks of a weight with a scale each, down and across; shards may divide one."""
    return ceil_div(rows, SQUARE_ROWS["fp8_blockwise"]), ceil_div(columns, BLOCKS["fp8_blockwise"])


def _row_bytes(scaling: str) -> int:
    """Bytes of a packed row's own scale."""
    return SCALE_BYTES if scaling == "rows" else 0


def _parts(scaling: str) -> tuple[int, int]:
    """Bytes of so many elements of a packed row."""
    return {"tensor": (1, 1), "rows": (1, 1), DELAYED: (1, 1), "mxfp8": (33, 32), "nvfp4": (9, 16), "fp8_blockwise": (1, 1)}[scaling]


def packing_bytes(rows: int, columns: int, scaling: str, itemsize: int, *, casts: bool) -> int:
    """Bytes inside the packing of a shard, `itemsize` a rounded element: of one slice, which may be rounded first."""
    height = min(rows, rounded_up(slice_rows(rows, columns), PACKED_SLICE))
    elements = height * columns
    if scaling == "tensor":
        return (elements * (1 + casts) + 1) * itemsize
    if scaling == DELAYED:
        return elements * itemsize * casts + min(height, slice_rows(rows, columns)) * columns * VALUE_BYTES
    if scaling == "rows":  # scales of rows or of columns, in fp32 and in the layout of the product
        factors = max(height, columns) * (VALUE_BYTES + itemsize * (itemsize != VALUE_BYTES))
        return elements * (1 + casts) * itemsize + factors
    if scaling == "fp8_blockwise":
        values = (1 + BLOCKS[scaling]) * squares(height, columns)[1]
        return height * (VALUE_BYTES * values + INDEX_BYTES) + elements * itemsize * casts
    making = BlockLinears(0, 0, (), itemsize, scaling)._making(height, columns)
    return VALUE_BYTES * elements + max(elements * itemsize * casts, making)
