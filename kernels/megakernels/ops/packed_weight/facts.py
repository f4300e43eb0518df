"""Facts of weights in four or eight bits: the bytes of a row, and the values of its codes.

A row is one record of bytes: its codes, two of four bits in a byte, the lower half first, or one of eight; the largest magnitude of each
block of columns, in fp32, or nested: in eight bits with a mean and a step of the row, both fp32. The last block of a row may be short.

Source: Dettmers et al., QLoRA, arXiv:2305.14314, section 3, with a row of the matrix for the groups of 256 blocks.
"""

from typing import NamedTuple

from megakernels.facts import Pass, ceil_div

NF4 = "nf4"
INT8 = "int8"
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The sixteen values: quantiles of a normal distribution, scaled to [-1, 1], with a zero. Source: arXiv:2305.14314, appendix E."""
LARGEST = 127
"""The largest code of eight bits."""
MAXIMUM_BYTES, NESTED_BYTES = 4, 8
"""Bytes of a block's magnitude in fp32, and of a row's mean and step."""
PACKED_SLICE_ELEMENTS = 1 << 18
"""Elements that plain torch makes at once."""
PACKED_TILE = 1024
"""Elements of a row that one program of the Triton kernel makes."""
LAUNCHES_OF_ROWS = 14
"""Launches of plain torch for each slice."""


class Packing(NamedTuple):
    """The form of a packed weight.

    Attributes:
        kind: nf4 or int8.
        block: Columns that share a magnitude.
        nested: True if magnitudes are in eight bits.
    """

    kind: str
    block: int
    nested: bool

    def code_bytes(self, columns: int) -> int:
        """Bytes of a row's codes."""
        return ceil_div(columns, 2) if self.kind == NF4 else columns

    def maximum_bytes(self, columns: int) -> int:
        """Bytes of the magnitudes of a row's blocks."""
        return ceil_div(columns, self.block) * (1 if self.nested else MAXIMUM_BYTES)

    @property
    def nested_bytes(self) -> int:
        """Bytes of a row's mean and step."""
        return NESTED_BYTES if self.nested else 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row."""
        return self.code_bytes(columns) + self.maximum_bytes(columns) + self.nested_bytes

    def unpacking(self, rows: int, columns: int, itemsize: int, *, fused: bool) -> Pass:
        """The pass that makes a matrix of its packed rows: they are read, and its elements written."""
        moved = rows * (self.row_bytes(columns) + columns * itemsize)
        slices = ceil_div(rows, slice_rows(rows, columns))
        return Pass(moved, 0, 1) if fused else Pass(moved + 24 * rows * columns, 0, LAUNCHES_OF_ROWS * slices)


def slice_rows(rows: int, columns: int) -> int:
    """Rows that plain torch makes at once."""
    return max(1, min(rows, PACKED_SLICE_ELEMENTS // max(columns, 1)))
