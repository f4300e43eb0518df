"""Shared by the scan's kernels: rows, decays and values of a tile.

A tile has Q positions, M = Q · R rows: R ranks of each position, of which those beyond the model's rank are empty. `tables` [4, B, H, T]
has γ, w, and the running sum of log decays of each position's tile as two fp32 numbers, the rounded sum and the rest.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import exp, softplus, widen
from megakernels.ops.mamba3 import chunk

PI = tl.constexpr(3.141592653589793)
TURN_HIGH, TURN_LOW = tl.constexpr(6.28125), tl.constexpr(0.0019353071795864769)
"""2π in two parts; the first has so few bits that its multiples are exact."""
PER_TURN = tl.constexpr(0.15915494309189535)
SLOWEST_RATE = tl.constexpr(chunk.SLOWEST_RATE)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(first, stop, rank_count, M: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Position and rank of each row, and which rows exist."""
    row = tl.arange(0, M)
    position, rank = first + row // R, row % R
    return position, rank, (position < stop) & (rank < rank_count)


@triton.jit
def steps_of(raw, bias, valid):  # type: ignore[no-untyped-def]
    """The step Δ, 0 where there is no position."""
    return tl.where(valid, softplus(raw + bias), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def decays_of(  # type: ignore[no-untyped-def]
    tables, starts, places, first, last, sizes, num_rows, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr
):
    """Per row w and the decays from the tile's start and to its end; and the decay across the tile. Decays between documents are 0.

    `places` has sequence, head, group, and each row's position, rank and mask; `sizes` begins with numbers of positions and heads.
    """
    batch, head, _group, position, _rank, valid = places
    num_positions, num_heads = sizes[0], sizes[1]
    row = tables + (batch * num_heads + head) * num_positions
    arrived = tl.load(row + num_rows + position, mask=valid, other=0.0).to(tl.float32)
    sums = tl.load(row + 2 * num_rows + position, mask=valid, other=0.0).to(tl.float32)
    total = tl.load(row + 2 * num_rows + last).to(tl.float32)
    fall = total - sums
    if PRECISE:
        rests = tl.load(row + 3 * num_rows + position, mask=valid, other=0.0).to(tl.float32)
        fall += tl.load(row + 3 * num_rows + last).to(tl.float32) - rests
    from_start, to_end, across = exp(sums), exp(fall), exp(total)
    if HAS_STARTS:
        seen = tl.load(starts + batch * num_positions + position, mask=valid, other=0)
        end = tl.load(starts + batch * num_positions + last)
        from_start = tl.where(seen < first, from_start, 0.0)
        to_end = tl.where(position >= end, to_end, 0.0)
        across = tl.where(end < first, across, 0.0)
    return arrived, tl.where(valid, from_start, 0.0), tl.where(valid, to_end, 0.0), across


@triton.jit  # type: ignore[untyped-decorator]
def pairs_of(  # type: ignore[no-untyped-def]
    tables, starts, places, first, stop, sizes, num_rows,
    Q: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Decay and weight of each pair of positions [Q, Q], 0 where the key is later than the query; and w of each position.

    The mask is applied before the exponential. Rows are queries, with `KEYS` keys. With `PRECISE` sums are two fp32 numbers: the
    difference of two has no more rounding than a sum over the span. `places` and `sizes` as for `decays_of`.
    """
    batch, head = places[0], places[1]
    num_positions, num_heads = sizes[0], sizes[1]
    position = first + tl.arange(0, Q)
    valid = position < stop
    row = tables + (batch * num_heads + head) * num_positions + position
    gamma = tl.load(row, mask=valid, other=0.0).to(tl.float32)
    arrived = tl.load(row + num_rows, mask=valid, other=0.0).to(tl.float32)
    sums = tl.load(row + 2 * num_rows, mask=valid, other=0.0).to(tl.float32)
    later = tl.where(valid, sums, float("-inf"))
    if PRECISE:
        rests = tl.load(row + 3 * num_rows, mask=valid, other=0.0).to(tl.float32)
    if HAS_STARTS:
        seen = tl.load(starts + batch * num_positions + position, mask=valid, other=0)
    if KEYS:
        earlier = position[None, :] > position[:, None]
        fall = later[None, :] - sums[:, None]
        if PRECISE:
            fall += rests[None, :] - rests[:, None]
        if HAS_STARTS:
            earlier &= position[:, None] >= seen[None, :]
        weight = arrived[:, None]
    else:
        earlier = position[:, None] > position[None, :]
        fall = later[:, None] - sums[None, :]
        if PRECISE:
            fall += rests[:, None] - rests[None, :]
        if HAS_STARTS:
            earlier &= position[None, :] >= seen[:, None]
        weight = arrived[None, :]
    decay = exp(tl.where(earlier, fall, float("-inf")))
    return decay, decay * weight + tl.where(position[:, None] == position[None, :], gamma[:, None], 0.0), arrived


@triton.jit  # type: ignore[untyped-decorator]
def over_pairs(matrix, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """A matrix of positions [Q, Q] for all pairs of rows [Q · R, Q · R]."""
    Q: tl.constexpr = matrix.shape[0]
    return tl.reshape(tl.broadcast_to(matrix[:, None, :, None], [Q, R, Q, R]), [Q * R, Q * R])


@triton.jit  # type: ignore[untyped-decorator]
def pairs_over_ranks(rows, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of a matrix of rows [Q · R, Q · R] over the ranks of each pair of positions: [Q, Q]."""
    Q: tl.constexpr = rows.shape[0] // R
    return tl.sum(tl.sum(tl.reshape(rows, [Q, R, Q, R]), 3), 1)


@triton.jit
def accumulate(pointer, values, mask):  # type: ignore[no-untyped-def]
    """Adds to values in memory that no other program writes."""
    tl.store(pointer, tl.load(pointer, mask=mask, other=0.0).to(tl.float32) + values, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def over_ranks(rows, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of the rows [Q · R, W] of each position: [Q, W]."""
    if R == 1:
        return rows
    else:  # noqa: RET505
        return tl.sum(tl.reshape(rows, [rows.shape[0] // R, R, rows.shape[1]]), 1)


@triton.jit  # type: ignore[untyped-decorator]
def over_positions(rows, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of the rows [Q · R, W] of each rank: [R, W]."""
    return tl.sum(tl.reshape(rows, [rows.shape[0] // R, R, rows.shape[1]]), 0)


@triton.jit  # type: ignore[untyped-decorator]
def per_position(values, M: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of a vector of rows [M] over the ranks of each position: [Q]."""
    return tl.sum(tl.reshape(values, [M // R, R]), 1)


@triton.jit
def head_rows(pointer, batch, head, position, there, column, head_width, stride_b, stride_t, stride_h):  # type: ignore[no-untyped-def]
    """Columns of x, z or the gradient of y of each position, [Q, columns], fp32, which its ranks share."""
    at = pointer + batch * stride_b + head * stride_h + position.to(tl.int64)[:, None] * stride_t + column[None, :]
    return widen(tl.load(at, mask=there[:, None] & (column < head_width)[None, :], other=0.0))


@triton.jit  # type: ignore[untyped-decorator]
def mimo_rows(weight, head, rank_count, column, head_width, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of a projection's row of each rank, [R, columns], fp32."""
    rank = tl.arange(0, R)
    mask = (rank < rank_count)[:, None] & (column < head_width)[None, :]
    return widen(tl.load(weight + ((head * rank_count + rank) * head_width)[:, None] + column[None, :], mask=mask, other=0.0))


@triton.jit  # type: ignore[untyped-decorator]
def value_rows(  # type: ignore[no-untyped-def]
    x, mimo_x, places, column, head_width, rank_count, strides, R: tl.constexpr, HAS_MIMO: tl.constexpr
):
    """Columns of the values of a tile's rows, [Q · R, columns], fp32: zero for rows that do not exist; `places` as for `decays_of`."""
    batch, head, _group, position, _rank, valid = places
    rows = head_rows(x, batch, head, position, valid, column, head_width, strides[0], strides[1], strides[2])
    if HAS_MIMO:
        M: tl.constexpr = position.shape[0]
        W: tl.constexpr = column.shape[0]
        REPEATS: tl.constexpr = max(1, M * W // 1024)
        # the ranks of the rows that the threads load together, in the layout of these rows; the remaining threads repeat them
        rank = tl.arange(0, M // REPEATS) % R
        mask = (rank < rank_count)[:, None] & (column < head_width)[None, :]
        weight = widen(tl.load(mimo_x + ((head * rank_count + rank) * head_width)[:, None] + column[None, :], mask=mask, other=0.0))
        rows = tl.reshape(tl.reshape(rows, [REPEATS, M // REPEATS, W]) * weight[None, :, :], [M, W])
    return rows
