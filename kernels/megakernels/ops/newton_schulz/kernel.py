"""Triton kernel of alpha · x xᵀ + beta · added: the tiles of the lower triangle are computed, and its elements stored twice.

That is half the multiplications of a full product, and the result is bitwise symmetric whatever the product of a tile is: three TF32
products add up in another order at (i, j) than at (j, i), and so does a BLAS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import dot, narrow, on_device_of
from megakernels.ops.newton_schulz.facts import SYMMETRIC_DEPTH, tile_side


@triton.jit  # type: ignore[untyped-decorator]
def symmetric_product_kernel(  # type: ignore[no-untyped-def]
    x, added, y, num_rows, num_cols,
    x_matrix_stride, x_row_stride, x_col_stride,
    alpha, beta,
    TILE: tl.constexpr, STEP: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """One tile of the lower triangle of one matrix, and its mirror image."""
    down = tl.program_id(0)
    across = tl.program_id(1)
    if across > down:
        return
    matrix = tl.program_id(2).to(tl.int64)
    place = tl.arange(0, TILE)
    row = down.to(tl.int64) * TILE + place
    col = across.to(tl.int64) * TILE + place
    step = tl.arange(0, STEP).to(tl.int64)
    left = x + matrix * x_matrix_stride + row[:, None] * x_row_stride + step[None, :] * x_col_stride
    right = x + matrix * x_matrix_stride + step[:, None] * x_col_stride + col[None, :] * x_row_stride
    total = tl.zeros([TILE, TILE], dtype=tl.float32)
    for first in range(0, num_cols, STEP):
        rest = num_cols - first
        a = tl.load(left, mask=(row < num_rows)[:, None] & (step < rest)[None, :], other=0.0)
        b = tl.load(right, mask=(step < rest)[:, None] & (col < num_rows)[None, :], other=0.0)
        total += dot(a, b)
        left += STEP * x_col_stride
        right += STEP * x_col_stride
    total = alpha * total
    rows = (row < num_rows)[:, None]  # no column of the lower triangle is beyond its row
    mask = rows & (col < num_rows)[None, :]
    # within a tile, 32-bit offsets are sufficient: rows are shorter than 2^24
    corner = matrix * num_rows * num_rows + down.to(tl.int64) * TILE * num_rows + across.to(tl.int64) * TILE
    if ADDED:
        total += beta * tl.load(added + corner + (place[:, None] * num_rows + place[None, :]), mask=mask, other=0.0).to(tl.float32)
    tl.store(y + corner + (place[:, None] * num_rows + place[None, :]), narrow(total, y.dtype.element_ty), mask=mask)
    if across < down:
        mirror = matrix * num_rows * num_rows + across.to(tl.int64) * TILE * num_rows + down.to(tl.int64) * TILE
        tl.store(y + mirror + (place[None, :] * num_rows + place[:, None]), narrow(total, y.dtype.element_ty), mask=rows)
    else:
        tl.debug_barrier()  # other threads have stored what is above the diagonal, which the mirror image of what is below replaces
        below = rows & (place[:, None] > place[None, :])
        tl.store(y + corner + (place[None, :] * num_rows + place[:, None]), narrow(total, y.dtype.element_ty), mask=below)


def launch_options(num_rows: int, element_bytes: int) -> dict[str, int]:
    """Tile and warps for matrices of `num_rows` rows."""
    tile = tile_side(num_rows, element_bytes)
    return {"TILE": tile, "STEP": SYMMETRIC_DEPTH[element_bytes], "num_warps": 8 if tile == 128 else 4, "num_stages": 3}


def forward(x: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    num_matrices, num_rows, num_cols = x.shape
    y = torch.empty(num_matrices, num_rows, num_rows, dtype=x.dtype, device=x.device)
    options = launch_options(num_rows, x.element_size())
    tiles = triton.cdiv(num_rows, options["TILE"])
    if y.numel():
        with on_device_of(x):
            symmetric_product_kernel[(tiles, tiles, num_matrices)](
                x, y if added is None else added.contiguous(), y, num_rows, num_cols,
                *x.stride(),
                alpha, beta,
                ADDED=added is not None, **options,
            )  # fmt: skip
    return y
