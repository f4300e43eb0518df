"""Tile sizes of the kernels, without a dependency on triton."""

SMALLEST_DOT = 16
"""Minimum side of a matrix product's tiles, in elements."""


def block_of(size: int, smallest: int = 1) -> int:
    """The tile size for `size` elements: a power of two, at least `smallest`."""
    return max(smallest, 1 << max(0, size - 1).bit_length())
