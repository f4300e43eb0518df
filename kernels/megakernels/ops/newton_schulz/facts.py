"""Facts of the symmetric product x xᵀ of Newton-Schulz iterations: the tiles of one triangle, each stored twice."""

from __future__ import annotations

from megakernels.facts import SMALLEST_DOT, block_of, ceil_div

SYMMETRIC_TILE = {2: 128, 4: 64}
"""Rows of a tile, by bytes of an element."""
SYMMETRIC_DEPTH = {2: 64, 4: 32}
"""Columns of x per step."""


def tile_side(num_rows: int, itemsize: int) -> int:
    """Rows and columns of a tile."""
    return min(SYMMETRIC_TILE[itemsize], block_of(num_rows, SMALLEST_DOT))


def num_tiles(num_rows: int, itemsize: int) -> int:
    """Tiles of the lower triangle."""
    tiles = ceil_div(num_rows, tile_side(num_rows, itemsize))
    return tiles * (tiles + 1) // 2
