"""Cost of the symmetric product's kernel; needs no triton."""

from typing import Any

from torch import Tensor

from megakernels._common.cost import Cost
from megakernels.ops.newton_schulz.facts import num_tiles, tile_side


def cost(x: Tensor, *_: Any) -> Cost:
    """Cost of `kernel.forward`: the products of the tiles of the lower triangle."""
    num_matrices, num_rows, num_cols = x.shape
    tiles = num_tiles(num_rows, x.element_size())
    return Cost({x.dtype: num_matrices * tiles * 2 * tile_side(num_rows, x.element_size()) ** 2 * num_cols})
