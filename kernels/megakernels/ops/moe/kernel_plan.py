"""Triton kernels that sort (token, slot) pairs by expert, split sorted rows into tiles, and copy or sum a token's slots on the device.

A stable counting sort: each block of pairs counts its experts, torch's running sums turn the counts into first rows, and each block writes
its pairs in order. No two programs write the same element.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of, unit_stride
from megakernels.facts import LARGEST_TILE_WIDTH, SMALLEST_DOT, TILE_ELEMENTS, block_of
from megakernels.ops.moe.facts import EXPERTS_AT_ONCE, INVERT_PAIRS, SORT_PAIRS, WHOLE


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(indices, counts, num_pairs, num_experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of pairs of one block for each expert: one row of counts."""
    block = tl.program_id(0).to(tl.int64)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    chosen = tl.load(indices + pair, mask=pair < num_pairs, other=-1)
    for first in range(0, num_experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        found = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts + block * num_experts + expert, found, mask=expert < num_experts)


@triton.jit  # type: ignore[untyped-decorator]
def place_kernel(indices, starts, rows, num_pairs, num_experts, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes each pair of one block to its row: the first of its expert in this block, after those before it in the block."""
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAIRS)
    pair = block * PAIRS + place
    mask = pair < num_pairs
    own = tl.load(indices + pair, mask=mask, other=0)
    other = tl.load(indices + block * PAIRS + place, mask=mask, other=-1)
    before = tl.sum(((own[:, None] == other[None, :]) & (place[None, :] < place[:, None])).to(tl.int32), 1)
    first = tl.load(starts + block * num_experts + own, mask=mask, other=0)
    tl.store(rows + first + before, pair.to(tl.int32), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def invert_kernel(rows, positions, num_pairs, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of each pair that has one; a row below zero has no pair."""
    row = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    pair = tl.load(rows + row, mask=row < num_pairs, other=-1)
    tl.store(positions + pair, row.to(tl.int32), mask=pair >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def spread_kernel(x, positions, y, num_tokens, width, x_stride, top_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """ROWS tokens of x, each read once and written to the rows of its slots."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < num_tokens
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = there[:, None] & (cols < width)[None, :]
    value = narrow(tl.load(x + token[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32), y.dtype.element_ty)
    for slot in range(top_k):
        row = tl.load(positions + token * top_k + slot, mask=there, other=-1).to(tl.int64)
        tl.store(y + row[:, None] * width + cols[None, :], value, mask=mask & (row >= 0)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def sum_slots_kernel(  # type: ignore[no-untyped-def]
    x, positions, y, num_tokens, width, x_stride, top_k, INDIRECT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS tokens of y: the sum of each one's slots, in slot order; slot s of token n is row positions[n k + s], or row n k + s."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < num_tokens
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = there[:, None] & (cols < width)[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for slot in range(top_k):
        row = token * top_k + slot
        if INDIRECT:
            row = tl.load(positions + row, mask=there, other=-1).to(tl.int64)
        total += tl.load(x + row[:, None] * x_stride + cols[None, :], mask=mask & (row >= 0)[:, None], other=0.0).to(tl.float32)
    tl.store(y + token[:, None] * width + cols[None, :], narrow(total, y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def group_of(tile, ends, tile_ends, num_experts, TILE: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile of rows (num_experts if there is no such tile), the tile's first row, and the expert's end."""
    expert = tl.arange(0, EXPERTS)
    there = expert < num_experts
    tiles_to = tl.load(tile_ends + expert, mask=there, other=2147483647)
    rows_to = tl.load(ends + expert, mask=there, other=0)
    found = tl.sum((tiles_to <= tile).to(tl.int32), 0)
    tiles_before = tl.max(tl.where(tiles_to <= tile, tiles_to, 0), 0)
    rows_before = tl.max(tl.where(expert < found, rows_to, 0), 0)
    stop = tl.sum(tl.where(expert == found, rows_to, 0), 0)
    return found, rows_before + (tile - tiles_before) * TILE, stop


class Tiles(NamedTuple):
    """Tiles of sorted rows: the running sums of rows and of tiles by expert, and the maximum number of tiles."""

    ends: Tensor
    tile_ends: Tensor
    most: int
    rows: int


def tiles_of(counts: Tensor, num_rows: int, element_bytes: int) -> Tiles:
    """Splits `num_rows` rows into tiles with the average number of rows per expert, within bounds."""
    num_experts = counts.shape[0]
    size = tile_rows(num_rows, num_experts, element_bytes)
    ends = counts.cumsum(0, dtype=torch.int32)
    tile_ends = ((counts + (size - 1)) // size).cumsum(0, dtype=torch.int32)
    return Tiles(ends, tile_ends, num_rows // size + min(num_experts, num_rows), size)


def tile_rows(num_rows: int, num_experts: int, element_bytes: int) -> int:
    """Rows of a tile."""
    return min(256 // element_bytes, block_of(triton.cdiv(num_rows, num_experts), SMALLEST_DOT))


def sort_by_expert(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts pairs by expert, stably.

    Args:
        indices: int32 [M], each in [0, num_experts).
        num_experts: E.

    Returns:
        rows int32 [M], the pair that each row holds, and totals int32 [E].
    """
    indices = indices.contiguous()
    num_pairs = indices.shape[0]
    num_blocks = triton.cdiv(num_pairs, SORT_PAIRS)
    rows = torch.empty_like(indices)
    counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=indices.device)
    if num_pairs:
        with on_device_of(indices):
            count_kernel[(num_blocks,)](indices, counts, num_pairs, num_experts, PAIRS=SORT_PAIRS, EXPERTS=EXPERTS_AT_ONCE, num_warps=4)
    totals = counts.sum(0, dtype=torch.int32)
    first = totals.cumsum(0, dtype=torch.int32) - totals
    starts = counts.cumsum(0, dtype=torch.int32) - counts + first
    if num_pairs:
        with on_device_of(indices):
            place_kernel[(num_blocks,)](indices, starts, rows, num_pairs, num_experts, PAIRS=SORT_PAIRS, num_warps=8)
    return rows, totals


def sum_rows(x: Tensor, rows: Tensor | None, top_k: int, num_tokens: int = WHOLE) -> Tensor:
    """Each token's rows summed in slot order and in fp32: [M, h] → [N, h].

    Args:
        x: [M, h], sorted as `rows` says, or by token and slot; M = N·k.
        top_k: k.
        rows: int32 [M], the pair that each row of x holds, or None.
        num_tokens: N, if pairs may have no row.
    """
    x = unit_stride(x)
    y = torch.empty(x.shape[0] // top_k if num_tokens == WHOLE else num_tokens, x.shape[1], dtype=x.dtype, device=x.device)
    positions = None if rows is None else inverse(rows, num_tokens if num_tokens == WHOLE else num_tokens * top_k)
    if y.numel():
        options = sum_options(y.shape[1])
        grid = triton.cdiv(y.shape[0], options["ROWS"]), triton.cdiv(y.shape[1], options["BLOCK"])
        indirect = positions is not None
        with on_device_of(x):
            sum_slots_kernel[grid](x, positions if indirect else y, y, *y.shape, x.stride(0), top_k, INDIRECT=indirect, **options)
    return y


def gather_rows(x: Tensor, rows: Tensor, top_k: int, num_tokens: int = WHOLE) -> Tensor:
    """Each token copied to its rows: [N, h] → [M, h], row i is x[rows[i] // k].

    Args:
        x: [N, h].
        top_k: k.
        rows: int32 [M], the pair that each row holds; M = N·k.
        num_tokens: N, if pairs may have no row; a row below zero is then one of zeros.
    """
    if num_tokens == WHOLE:
        return spread(x, inverse(rows), top_k)
    y = torch.zeros(rows.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    return spread(x, inverse(rows, num_tokens * top_k), top_k, y)


def spread(x: Tensor, positions: Tensor, top_k: int, y: Tensor | None = None) -> Tensor:
    """`gather_rows`, given the row of each pair: int32 [N·k], below zero for none; with such pairs also the output."""
    x = unit_stride(x)
    y = torch.empty(positions.shape[0], x.shape[1], dtype=x.dtype, device=x.device) if y is None else y
    if y.numel() and x.numel():
        options = sum_options(y.shape[1])
        grid = triton.cdiv(x.shape[0], options["ROWS"]), triton.cdiv(y.shape[1], options["BLOCK"])
        with on_device_of(x):
            spread_kernel[grid](x, positions, y, *x.shape, x.stride(0), top_k, **options)
    return y


def inverse(rows: Tensor, num_pairs: int = WHOLE) -> Tensor:
    """The row of each pair, int32, from the pair of each row, int32 [M]; below zero for a pair without a row, if `num_pairs` is given."""
    rows = rows.contiguous()
    positions = torch.empty_like(rows) if num_pairs == WHOLE else rows.new_full((num_pairs,), -1)
    if rows.numel():
        with on_device_of(rows):
            invert_kernel[(triton.cdiv(rows.shape[0], INVERT_PAIRS),)](rows, positions, rows.shape[0], PAIRS=INVERT_PAIRS, num_warps=4)
    return positions


def sum_options(width: int) -> dict[str, int]:
    """Tile and warps for rows of `width`."""
    block = min(LARGEST_TILE_WIDTH, block_of(width))
    return {"ROWS": TILE_ELEMENTS // block, "BLOCK": block, "num_warps": 4}
