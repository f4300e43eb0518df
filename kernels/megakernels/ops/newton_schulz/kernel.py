"""Triton kernels of the products of Newton-Schulz steps whose results are symmetric: the tiles of the lower triangle, each stored twice.

That is half the multiplications of a full product, and the result is bitwise symmetric whatever the product of a tile is: three TF32
products, or a BLAS, sum in another order at (i, j) than at (j, i).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megakernels._common.tiles import dot, narrow, num_multiprocessors, on_device_of
from megakernels.facts import DESCRIPTOR_BYTES
from megakernels.ops.newton_schulz import quack
from megakernels.ops.newton_schulz.facts import SYMMETRIC_BAND, SYMMETRIC_DEPTH, num_bands, tile_side, uses_descriptors
from megakernels.ops.newton_schulz.iteration import iterate


@triton.jit  # type: ignore[untyped-decorator]
def symmetric_product_kernel(  # type: ignore[no-untyped-def]
    a, b, added, scales, y,
    num_rows, num_cols, matrix_stride, row_stride, col_stride,
    alpha, beta, diagonal,
    TILE: tl.constexpr, STEP: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
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
    left = a + matrix * matrix_stride + row[:, None] * row_stride + step[None, :] * col_stride
    right = b + matrix * matrix_stride + step[:, None] * col_stride + col[None, :] * row_stride
    total = tl.zeros([TILE, TILE], dtype=tl.float32)
    for first in range(0, num_cols, STEP):
        rest = num_cols - first
        rows_of_a = tl.load(left, mask=(row < num_rows)[:, None] & (step < rest)[None, :], other=0.0)
        rows_of_b = tl.load(right, mask=(step < rest)[:, None] & (col < num_rows)[None, :], other=0.0)
        total += dot(rows_of_a, rows_of_b)
        left += STEP * col_stride
        right += STEP * col_stride
    total = alpha * total
    rows = (row < num_rows)[:, None]  # no column of the lower triangle is right of the diagonal
    mask = rows & (col < num_rows)[None, :]
    # within a tile, 32-bit offsets are sufficient: rows are shorter than 2^24
    corner = matrix * num_rows * num_rows + down.to(tl.int64) * TILE * num_rows + across.to(tl.int64) * TILE
    if ADDED:
        total += beta * tl.load(added + corner + (place[:, None] * num_rows + place[None, :]), mask=mask, other=0.0).to(tl.float32)
    if across == down:
        total += tl.where(place[:, None] == place[None, :], diagonal, 0.0)
    if SCALED:
        total *= tl.load(scales + matrix)
    tl.store(y + corner + (place[:, None] * num_rows + place[None, :]), narrow(total, y.dtype.element_ty), mask=mask)
    if across < down:
        mirror = matrix * num_rows * num_rows + across.to(tl.int64) * TILE * num_rows + down.to(tl.int64) * TILE
        tl.store(y + mirror + (place[None, :] * num_rows + place[:, None]), narrow(total, y.dtype.element_ty), mask=rows)
    else:
        tl.debug_barrier()  # replaces elements above the diagonal, which other threads have stored, by the mirror image
        below = rows & (place[:, None] > place[None, :])
        tl.store(y + corner + (place[None, :] * num_rows + place[:, None]), narrow(total, y.dtype.element_ty), mask=below)


@triton.jit  # type: ignore[untyped-decorator]
def store_square(  # type: ignore[no-untyped-def]
    total, y, added, matrix, row, col, beta, diagonal, scale, TILE: tl.constexpr, ADDED: tl.constexpr
):
    """Stores a square of the lower triangle, and its mirror image, but no computed element above the diagonal."""
    if col <= row:
        if ADDED:
            total += beta * tl.reshape(added.load([matrix, row, col]), (TILE, TILE)).to(tl.float32)
        if col == row:
            place = tl.arange(0, TILE)
            total += tl.where(place[:, None] == place[None, :], diagonal, 0.0)
            found = narrow(total * scale, y.dtype)
            found = tl.where(place[:, None] >= place[None, :], found, tl.trans(found))
            y.store([matrix, row, col], tl.reshape(found, (1, TILE, TILE)))
        else:
            found = narrow(total * scale, y.dtype)
            y.store([matrix, row, col], tl.reshape(found, (1, TILE, TILE)))
            y.store([matrix, col, row], tl.reshape(tl.trans(found), (1, TILE, TILE)))


@triton.jit  # type: ignore[untyped-decorator]
def symmetric_bands_kernel(  # type: ignore[no-untyped-def]
    a, b, added, scales, y,
    num_matrices, num_rows, num_cols, num_bands,
    alpha, beta, diagonal,
    TILE: tl.constexpr, STEP: tl.constexpr, TALL: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Tiles of two squares each, a row of a square of two by two in turn, of all matrices; operands and results have descriptors."""
    BAND: tl.constexpr = 2 * TILE
    for tile in tl.range(tl.program_id(0), num_matrices * num_bands * 2, tl.num_programs(0)):
        matrix = tile // (2 * num_bands)
        band = tile % (2 * num_bands) // 2
        down = ((tl.sqrt(8.0 * tl.cast(band, tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)  # exact to one
        down = tl.where(down * (down + 1) // 2 > band, down - 1, down)
        down = tl.where((down + 1) * (down + 2) // 2 <= band, down + 1, down)
        row = down * BAND + tile % 2 * TILE
        col = (band - down * (down + 1) // 2) * BAND
        if row < num_rows:
            total = tl.zeros([TILE, BAND], dtype=tl.float32)
            for first in tl.range(0, num_cols, STEP):
                if TALL:
                    left = tl.trans(a.load([matrix * num_cols + first, row]))
                    right = b.load([matrix * num_cols + first, col])
                else:
                    left = a.load([matrix * num_rows + row, first])
                    right = tl.trans(b.load([matrix * num_rows + col, first]))
                total += dot(left, right)
            total *= alpha
            scale = 1.0
            if SCALED:
                scale = tl.load(scales + matrix)
            near, far = tl.split(tl.permute(tl.reshape(total, (TILE, 2, TILE)), (0, 2, 1)))
            store_square(near, y, added, matrix, row, col, beta, diagonal, scale, TILE, ADDED)
            store_square(far, y, added, matrix, row, col + TILE, beta, diagonal, scale, TILE, ADDED)


def launch_options(num_rows: int, element_bytes: int) -> dict[str, int]:
    """Tile and warps of the plain kernel for matrices of `num_rows` rows."""
    tile = tile_side(num_rows, element_bytes)
    return {"TILE": tile, "STEP": SYMMETRIC_DEPTH[element_bytes], "num_warps": 8 if tile == 128 else 4, "num_stages": 3}


BAND_OPTIONS = {"TILE": SYMMETRIC_BAND // 2, "STEP": SYMMETRIC_DEPTH[2], "num_warps": 8, "num_stages": 3}


def product(
    a: Tensor, b: Tensor, out: Tensor,
    *, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0, scales: Tensor | None = None,
    tall: bool = False,
) -> None:  # fmt: skip
    """Follows the contract of `reference.product`, for contiguous fp32, bf16 and fp16."""
    num_matrices, num_rows, num_cols = a.shape[0], out.shape[1], a.shape[1 if tall else 2]
    if not out.numel():
        return
    if quack.runs(a, out, scales, diagonal, tall=tall):
        quack.product(a, b, out, alpha=alpha, added=added, beta=beta, diagonal=diagonal, tall=tall)
        return
    factors = out if scales is None else scales
    given = {"ADDED": added is not None, "SCALED": scales is not None}
    with on_device_of(a):
        aligned = all(each.data_ptr() % DESCRIPTOR_BYTES == 0 for each in (a, b, out))
        if aligned and uses_descriptors(num_rows, num_cols, a.element_size(), tall=tall):
            bands, tile, step = num_bands(num_rows), BAND_OPTIONS["TILE"], BAND_OPTIONS["STEP"]
            squares = TensorDescriptor.from_tensor(out, [1, tile, tile])
            left, right = (
                TensorDescriptor.from_tensor(each.flatten(0, 1), [step, rows] if tall else [rows, step])
                for each, rows in ((a, tile), (b, SYMMETRIC_BAND))
            )
            symmetric_bands_kernel[(min(2 * num_matrices * bands, num_multiprocessors(a.device)),)](
                left, right, squares if added is None else TensorDescriptor.from_tensor(added, [1, tile, tile]), factors, squares,
                num_matrices, num_rows, num_cols, bands,
                alpha, beta, diagonal,
                TALL=tall, **given, **BAND_OPTIONS,
            )  # fmt: skip
            return
        options = launch_options(num_rows, a.element_size())
        tiles = triton.cdiv(num_rows, options["TILE"])
        matrix_stride, *strides = a.stride()
        symmetric_product_kernel[(tiles, tiles, num_matrices)](
            a, b, out if added is None else added, factors, out,
            num_rows, num_cols, matrix_stride, *(reversed(strides) if tall else strides),
            alpha, beta, diagonal,
            **given, **options,
        )  # fmt: skip


def forward(x: Tensor, num_steps: int) -> None:
    """Follows the contract of `reference.forward`."""
    iterate(x, num_steps, product)
