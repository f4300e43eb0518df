"""Triton kernels of copies in eight bits: two passes over a matrix, the largest magnitudes and the rounding, which also transposes.

- `fp8_row_kernel`: one program per few whole rows, in place of the next three where each row has a scale: both in one pass.
- `fp8_maxima_kernel`: one program per tile: the largest magnitude of its rows, of its columns or of all of it.
- `fp8_scale_kernel`: one program per few scales: the largest of the tiles, and its power of two.
- `fp8_round_kernel`: one program per tile of the copy: elements divided by their scales and rounded, zeros in the padding.
- `fp8_delayed_kernel`: one program per tile of the copy, in place of the first three where the factor is given: elements multiplied by it,
  bounded and rounded, and their largest magnitude joined to that of the step.
- `fp8_turn_kernel`: one program per tile: the transpose of a copy that exists.

Magnitudes are compared as integers, which order them and keep what is not a number. There is no division: the scale is the power of two
with the largest magnitude's exponent, so results equal the reference's bitwise.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import INTERPRETED, on_device_of, widen
from megakernels.facts import block_of
from megakernels.ops.fp8_linear.delayed import Delayed
from megakernels.ops.fp8_linear.facts import (
    BY_COLUMN,
    BY_ROW,
    GIVEN,
    ROW_TILE_ELEMENTS,
    SCALED_TILE,
    WHOLE,
    in_one_pass,
    num_maxima,
    padded,
)
from megakernels.ops.fp8_linear.reference import SMALLEST, Operand

NUM_WARPS = 8
ONE_SCALE, MANY_SCALES = {"NUM": 1, "COUNT": 4096}, {"NUM": 128, "COUNT": 32}
"""Scales of a program of `fp8_scale_kernel`, and maxima of each that it compares at once."""
NORMAL, FRACTION, INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FFFFF), tl.constexpr(0x7F800000)
THREE_QUARTERS = tl.constexpr(0x600000)
"""The fraction bits of 1.75, which the largest number of both formats has."""
LEAST = tl.constexpr(struct.unpack("<i", struct.pack("<f", SMALLEST))[0])
FRACTION_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


@triton.jit
def magnitudes(values):  # type: ignore[no-untyped-def]
    """Bits of the absolute values of fp32."""
    return values.to(tl.int32, bitcast=True) & NORMAL


@triton.jit
def tile_at(x, row, column, num_rows, num_columns, stride):  # type: ignore[no-untyped-def]
    """A tile of a matrix, zero outside."""
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_maxima_kernel(x, maxima, num_rows, num_columns, stride, SIDE: tl.constexpr, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`maxima` [tiles of a row, rows], [tiles of a column, columns] or [tiles, 1], int32 bits of fp32."""
    row, column = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    found = magnitudes(widen(tile_at(x, row, column, num_rows, num_columns, stride)))
    if SCALED == 1:
        tl.store(maxima + tl.program_id(1).to(tl.int64) * num_rows + row, tl.max(found, 1), mask=row < num_rows)
    elif SCALED == 2:
        tl.store(maxima + tl.program_id(0).to(tl.int64) * num_columns + column, tl.max(found, 0), mask=column < num_columns)
    else:
        tl.store(maxima + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(tl.max(found, 1), 0))


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(largest, EXPONENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The power of two of largest magnitudes, given as bits; infinite for infinity, 0 for NaN."""
    exponent = (largest >> 23) - EXPONENT + tl.where((largest & FRACTION) > THREE_QUARTERS, 1, 0)
    scale = tl.where(largest == INFINITE, INFINITE, exponent << 23)
    return tl.where(largest > INFINITE, 0, scale).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scale):  # type: ignore[no-untyped-def]
    """The reciprocal of a scale that is a power of two, from its exponent; 0 for infinity and NaN."""
    field = magnitudes(scale) >> 23
    factor = tl.where(field == 0, INFINITE, (254 - field) << 23)
    return tl.where(field == 255, 0, factor).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_scale_kernel(maxima, scales, count, num, num_padded, EXPONENT: tl.constexpr, COUNT: tl.constexpr, NUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales [padded] from `maxima` [count, num]; 1 for padding."""
    index, part = tl.program_id(0) * NUM + tl.arange(0, NUM), tl.arange(0, COUNT)
    found = tl.full([NUM], LEAST, tl.int32)
    for first in range(0, count, COUNT):
        mask = (first + part < count)[:, None] & (index < num)[None, :]
        each = tl.load(maxima + (first + part).to(tl.int64)[:, None] * num + index[None, :], mask=mask, other=0)
        found = tl.maximum(found, tl.max(each, 0))
    tl.store(scales + index, tl.where(index < num, scale_of(found, EXPONENT), 1.0), mask=index < num_padded)


@triton.jit  # type: ignore[untyped-decorator]
def eight_bits(values, FRACTION_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the nearest e4m3 or e5m2, ties to even; NaN for values that are not finite. The interpreter's cast does not round."""
    bits = magnitudes(values)
    if INTERPRETED:
        LOWEST: tl.constexpr = 121 if FRACTION_BITS == 3 else 113
        field = tl.maximum(bits >> 23, LOWEST)
        unit = ((field - FRACTION_BITS) << 23).to(tl.float32, bitcast=True)
        steps = tl.abs(values) / unit
        whole = tl.floor(steps)
        odd = whole - 2.0 * tl.floor(0.5 * whole)
        up = (steps - whole > 0.5) | ((steps - whole == 0.5) & (odd == 1.0))
        steps = (whole + tl.where(up, 1.0, 0.0)).to(tl.int32)
        made = ((field - LOWEST) << FRACTION_BITS) + steps  # the first mantissa bit of a normal number is one step of the exponent
        return (tl.where(bits < INFINITE, made, 0x7F) | tl.where(values < 0.0, 0x80, 0)).to(tl.uint8)
    else:  # noqa: RET505  one branch is compiled
        DTYPE: tl.constexpr = tl.float8e4nv if FRACTION_BITS == 3 else tl.float8e5
        made = values.to(DTYPE).to(tl.uint8, bitcast=True)
        return tl.where(bits < INFINITE, made, 0x7F)


@triton.jit  # type: ignore[untyped-decorator]
def saturated(values, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values that are at most LIMIT, or not a number."""
    return tl.where(values > LIMIT, LIMIT, tl.where(values < -LIMIT, -LIMIT, values))


@triton.jit
def store_tile(data, bits, row, column, num_rows, num_columns):  # type: ignore[no-untyped-def]
    """Stores a tile of a dense copy."""
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(data + row.to(tl.int64)[:, None] * num_columns + column[None, :], bits, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_round_kernel(  # type: ignore[no-untyped-def]
    x, scales, data, num_rows, num_columns, stride, copy_rows, copy_columns,
    SIDE: tl.constexpr, SCALED: tl.constexpr, TURNED: tl.constexpr, FRACTION_BITS: tl.constexpr,
):  # fmt: skip
    """A tile of x in the copy [copy_rows, copy_columns], at its place or, with `TURNED`, at that of its transpose."""
    row, column = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    values = widen(tile_at(x, row, column, num_rows, num_columns, stride))
    if SCALED == 1:
        scale = tl.load(scales + row, mask=row < num_rows, other=1.0)[:, None]
    elif SCALED == 2:
        scale = tl.load(scales + column, mask=column < num_columns, other=1.0)[None, :]
    else:
        scale = tl.load(scales)
    bits = eight_bits(values * reciprocal(scale), FRACTION_BITS=FRACTION_BITS)
    if TURNED:
        store_tile(data, tl.trans(bits), column, row, copy_rows, copy_columns)
    else:
        store_tile(data, bits, row, column, copy_rows, copy_columns)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_delayed_kernel(  # type: ignore[no-untyped-def]
    x, factor, largest, scale, data, num_rows, num_columns, stride, copy_rows, copy_columns,
    SIDE: tl.constexpr, TURNED: tl.constexpr, FRACTION_BITS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A tile of x in the copy [copy_rows, copy_columns], as in `fp8_round_kernel`; `largest`, int32 bits of fp32, is raised."""
    row, column = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    values, by = widen(tile_at(x, row, column, num_rows, num_columns, stride)), tl.load(factor).to(tl.float32)
    tl.atomic_max(largest, tl.max(tl.max(magnitudes(values), 1), 0))
    if tl.program_id(0) == 0 and tl.program_id(1) == 0:
        tl.store(scale, tl.math.div_rn(1.0, by))
    bits = eight_bits(saturated(values * by, LIMIT), FRACTION_BITS=FRACTION_BITS)
    if TURNED:
        store_tile(data, tl.trans(bits), column, row, copy_rows, copy_columns)
    else:
        store_tile(data, bits, row, column, copy_rows, copy_columns)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_row_kernel(  # type: ignore[no-untyped-def]
    x, scales, data, num_rows, num_columns, stride, copy_rows, copy_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXPONENT: tl.constexpr, FRACTION_BITS: tl.constexpr,
):  # fmt: skip
    """Whole rows of x in the copy [copy_rows, copy_columns], and their scales; of rows that x does not have zeros and 1."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    values = widen(tile_at(x, row, column, num_rows, num_columns, stride))
    scale = tl.where(row < num_rows, scale_of(tl.maximum(tl.max(magnitudes(values), 1), LEAST), EXPONENT), 1.0)
    tl.store(scales + row, scale, mask=row < copy_rows)
    store_tile(data, eight_bits(values * reciprocal(scale)[:, None], FRACTION_BITS=FRACTION_BITS), row, column, copy_rows, copy_columns)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_turn_kernel(low, data, num_rows, num_columns, stride, copy_rows, copy_columns, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of the transpose of a copy."""
    row, column = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    store_tile(data, tl.trans(tile_at(low, row, column, num_rows, num_columns, stride)), column, row, copy_rows, copy_columns)


def operand(
    x: Tensor, *, dtype: torch.dtype, by_row: bool, transposed: bool = False, second: bool = False, delayed: Delayed | None = None
) -> Operand:
    """Follows the contract of `reference.operand`."""
    rows, summed = x.mT.shape if transposed else x.shape
    scaled = (BY_COLUMN if transposed else BY_ROW) if by_row else WHOLE
    shape = padded(rows) if second else rows, padded(summed)
    return Operand(*_copy(x, dtype, GIVEN if delayed else scaled, shape, turned=transposed, delayed=delayed))


def kept(x: Tensor, *, by_column: bool, delayed: Delayed | None = None) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.kept`."""
    scaled = GIVEN if delayed else BY_COLUMN if by_column else WHOLE
    return _copy(x, torch.float8_e4m3fn, scaled, (x.shape[0], padded(x.shape[1])), turned=False, delayed=delayed)


def turned(low: Tensor, scale: Tensor) -> Operand:
    """Follows the contract of `reference.turned`."""
    rows, columns = low.shape
    data = torch.empty(columns, padded(rows), dtype=low.dtype, device=low.device)
    if data.numel():
        with on_device_of(low):
            fp8_turn_kernel[_tiles(data.shape[1], columns)](
                *(low.view(torch.uint8), data.view(torch.uint8), rows, columns, low.stride(0), *data.shape),
                SIDE=SCALED_TILE,
                num_warps=NUM_WARPS,
            )
    return Operand(data, scale)


def _copy(
    x: Tensor, dtype: torch.dtype, scaled: int, shape: tuple[int, int], *, turned: bool, delayed: Delayed | None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    data = torch.empty(shape, dtype=dtype, device=x.device)
    if delayed is not None:
        return data, _delayed(x, dtype, data, delayed, turned=turned)
    num_padded = 1 if scaled == WHOLE else shape[1] if scaled == BY_COLUMN and not turned else shape[0]
    if in_one_pass(columns, scaled):
        scale = torch.empty(num_padded, dtype=torch.float32, device=x.device)
        if num_padded:
            tile = row_tile(shape[1])
            with on_device_of(x):
                fp8_row_kernel[(triton.cdiv(num_padded, tile["ROWS"]),)](
                    x, scale, data.view(torch.uint8), rows, columns,
                    x.stride(0),
                    *shape,
                    **tile, EXPONENT=LARGEST_EXPONENT[dtype], FRACTION_BITS=FRACTION_BITS[dtype], num_warps=NUM_WARPS,
                )  # fmt: skip
        return data, scale
    scale = scales(x, dtype, scaled, num_padded)
    covered = shape[::-1] if turned else shape
    if data.numel():
        with on_device_of(x):
            fp8_round_kernel[_tiles(*covered)](
                x, scale, data.view(torch.uint8), rows, columns,
                x.stride(0),
                *shape,
                SIDE=SCALED_TILE, SCALED=scaled, TURNED=turned, FRACTION_BITS=FRACTION_BITS[dtype], num_warps=NUM_WARPS,
            )  # fmt: skip
    return data, scale


def _delayed(x: Tensor, dtype: torch.dtype, data: Tensor, delayed: Delayed, *, turned: bool) -> Tensor:
    """Writes the copy with a given factor, and returns its scale."""
    if not data.numel():
        return delayed.factor.reciprocal()
    scale, covered = torch.empty(1, dtype=torch.float32, device=x.device), data.shape[::-1] if turned else data.shape
    with on_device_of(x):
        fp8_delayed_kernel[_tiles(*covered)](
            x, delayed.factor, delayed.largest.view(torch.int32), scale, data.view(torch.uint8), *x.shape, x.stride(0), *data.shape,
            SIDE=SCALED_TILE, TURNED=turned, FRACTION_BITS=FRACTION_BITS[dtype], LIMIT=torch.finfo(dtype).max, num_warps=NUM_WARPS,
        )  # fmt: skip
    return scale


def scales(x: Tensor, dtype: torch.dtype, scaled: int, num_padded: int) -> Tensor:
    """The divisors of a copy of x [rows, columns]: fp32 [num_padded], 1 for a row or a column that x does not have."""
    rows, columns = x.shape
    num = (1, rows, columns)[scaled]
    scale = torch.empty(num_padded, dtype=torch.float32, device=x.device)
    maxima = torch.empty(num_maxima(rows, columns, scaled), dtype=torch.int32, device=x.device)
    sides = ONE_SCALE if scaled == WHOLE else MANY_SCALES
    with on_device_of(x):
        if maxima.numel():
            fp8_maxima_kernel[_tiles(rows, columns)](
                x, maxima, rows, columns, x.stride(0), SIDE=SCALED_TILE, SCALED=scaled, num_warps=NUM_WARPS
            )
        if num_padded:
            fp8_scale_kernel[(triton.cdiv(num_padded, sides["NUM"]),)](
                maxima, scale, maxima.numel() // max(1, num), num, num_padded,
                EXPONENT=LARGEST_EXPONENT[dtype], **sides, num_warps=NUM_WARPS,
            )  # fmt: skip
    return scale


def row_tile(columns: int) -> dict[str, int]:
    """Rows and columns of a program that holds whole rows."""
    block = block_of(columns)
    return {"ROWS": max(1, ROW_TILE_ELEMENTS // block), "COLUMNS": block}


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, SCALED_TILE), triton.cdiv(columns, SCALED_TILE)
