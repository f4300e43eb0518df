"""Tile size and cost of the symmetric product's kernel; needs no triton."""

from typing import Any

from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.cost import Cost

LARGEST_TILE = {2: 128, 4: 64}
"""Rows of a tile by bytes per element."""


def tile_side(num_rows: int, element_bytes: int) -> int:
    """Rows and columns of a tile."""
    return min(LARGEST_TILE[element_bytes], block_of(num_rows, SMALLEST_DOT))


def cost(x: Tensor, *_: Any) -> Cost:
    """Cost of `kernel.forward`: the products of the tiles of the lower triangle."""
    num_matrices, num_rows, num_cols = x.shape
    side = tile_side(num_rows, x.element_size())
    tiles = -(-num_rows // side)
    return Cost({x.dtype: num_matrices * (tiles * (tiles + 1) // 2) * 2 * side * side * num_cols})
