"""Sides of the kernels' tiles, for whoever asks without triton too."""

SMALLEST_DOT = 16
"""Every side of a product's tiles has at least this many elements."""


def block_of(size: int, smallest: int = 1) -> int:
    """The tile that holds `size` elements: a power of two, at least `smallest`."""
    return max(smallest, 1 << max(0, size - 1).bit_length())
