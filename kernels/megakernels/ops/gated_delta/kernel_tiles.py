"""Shared by the delta rule's kernels: places of a tile, unit rows, gates and decays.

A tile is at most Q positions of a segment. A slot is a tile of one head and sequence: kernels hand each other buffers [slots, Q, …] of some
segments, with widths padded to powers of two and zeros where there is no position or column.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import sigmoid, softplus
from megakernels.facts import SMALLEST_DOT
from megakernels.ops.gated_delta import reference

EPS = tl.constexpr(reference.EPS)
"""Added to the squared length of a query or key, as in the reference."""
SIDE = tl.constexpr(SMALLEST_DOT)
"""Rows of a block of a tile: the smallest side of a matrix product."""


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(index, first_segment, tiles, save_every, num_positions, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """First position of a tile, and the end of its segment."""
    begin = (first_segment + index // tiles) * save_every
    return begin + index % tiles * Q, tl.minimum(begin + save_every, num_positions)


@triton.jit  # type: ignore[untyped-decorator]
def tile_place(  # type: ignore[no-untyped-def]
    first_segment, tiles, num_tiles, save_every, num_positions, num_heads, Q: tl.constexpr, ROWS: tl.constexpr
):
    """A program's tile and head, and the ROWS rows of the tile that it computes, consecutive programs the rows of one tile.

    Sequence, head, tile, slot, first position of the tile, end of its segment; then per row its number, its position and whether it exists.
    """
    index, head, batch = tl.program_id(0) // (Q // ROWS), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, stop = tile_of(index, first_segment, tiles, save_every, num_positions, Q=Q)
    row = tl.program_id(0) % (Q // ROWS) * ROWS + tl.arange(0, ROWS)
    slot = (batch * num_tiles + index) * num_heads + head
    return batch, head, index, slot, first, stop, row, first + row, first + row < stop


@triton.jit  # type: ignore[untyped-decorator]
def head_rows(q, k, place, heads_per_group, q_strides, k_strides, key_width, scale, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of a head's queries and keys, and the inverses of their lengths at a place's rows, those of queries times `scale`."""
    batch, group = place[0], place[1] // heads_per_group
    q += batch * q_strides[0] + group * q_strides[2]
    k += batch * k_strides[0] + group * k_strides[2]
    q_inverse = inverse_lengths(q, place[7], place[8], q_strides[1], key_width, K=K) * scale
    return q, k, q_inverse, inverse_lengths(k, place[7], place[8], k_strides[1], key_width, K=K)


@triton.jit
def row_places(pointer, position, stride_t, column):  # type: ignore[no-untyped-def]
    """Addresses of columns of a sequence's rows."""
    return pointer + position.to(tl.int64)[:, None] * stride_t + column[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def inverse_lengths(pointer, position, valid, stride_t, width, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / length of each row of queries or keys."""
    column = tl.arange(0, K)
    mask = valid[:, None] & (column < width)[None, :]
    rows = tl.load(row_places(pointer, position, stride_t, column), mask=mask, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(rows * rows, 1) + EPS)


@triton.jit
def unit_rows(pointer, position, valid, stride_t, column, width, inverse):  # type: ignore[no-untyped-def]
    """Columns of rows of unit length, fp32."""
    mask = valid[:, None] & (column < width)[None, :]
    return tl.load(row_places(pointer, position, stride_t, column), mask=mask, other=0.0).to(tl.float32) * inverse[:, None]


@triton.jit
def strengths_of(beta, position, valid, stride_t, beta_limit):  # type: ignore[no-untyped-def]
    """β, 0 where there is no position."""
    raw = tl.load(beta + position.to(tl.int64) * stride_t, mask=valid, other=0.0).to(tl.float32)
    return tl.where(valid, beta_limit * sigmoid(raw), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def documents_of(starts, batch, num_positions, first, stop, position, valid, Q: tl.constexpr, HAS_STARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First visible position of each, and of the tile's last one."""
    seen, end = tl.zeros_like(position), 0
    if HAS_STARTS:
        seen = tl.load(starts + batch * num_positions + position, mask=valid, other=0)
        end = tl.load(starts + batch * num_positions + tl.maximum(tl.minimum(first + Q, stop) - 1, 0))
    return seen, end


@triton.jit  # type: ignore[untyped-decorator]
def gates_of(  # type: ignore[no-untyped-def]
    decay, A_log, dt_bias, seen, end, first, position, valid, head, stride_t, HAS_STARTS: tl.constexpr
):
    """One decay a head: raw, log decay, the decays from the tile's start, to its end and across it, and running sums in two parts.

    Decays between documents are 0. A difference of two sums is the difference of the rounded ones plus that of the rests: it has the
    rounding of a sum over the span, not of the larger sum.
    """
    raw = tl.load(decay + position.to(tl.int64) * stride_t, mask=valid, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    log_decay = tl.where(valid, -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(raw), 0.0)
    wide = tl.cumsum(log_decay.to(tl.float64), 0)
    sums = wide.to(tl.float32)
    rests = (wide - sums.to(tl.float64)).to(tl.float32)
    total = tl.min(wide, 0)  # sums do not increase
    rounded = total.to(tl.float32)
    from_start, across = tl.exp(sums), tl.exp(rounded)
    to_end = tl.exp((rounded - sums) + ((total - rounded.to(tl.float64)).to(tl.float32) - rests))
    if HAS_STARTS:
        from_start = tl.where(seen < first, from_start, 0.0)
        to_end = tl.where(position >= end, to_end, 0.0)
        across = tl.where(end < first, across, 0.0)
    return raw, log_decay, tl.where(valid, from_start, 0.0), tl.where(valid, to_end, 0.0), across, sums, rests


@triton.jit
def decay_of(sums, rests, position, seen, valid):  # type: ignore[no-untyped-def]
    """The decay of each pair j ≤ i of one document, else 0; masked before it is exponentiated."""
    visible = (position[:, None] >= position[None, :]) & (position[None, :] >= seen[:, None]) & valid[:, None]
    fall = (sums[:, None] - sums[None, :]) + (rests[:, None] - rests[None, :])
    return tl.exp(tl.where(visible, fall, float("-inf")))


@triton.jit  # type: ignore[untyped-decorator]
def fall_of(sums, upper, lower, column, plane, K: tl.constexpr, PRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of log decays over the positions after row `lower` up to row `upper`, of each column; the rows broadcast."""
    fall = tl.load(sums + upper * K + column).to(tl.float32) - tl.load(sums + lower * K + column).to(tl.float32)
    if PRECISE:
        more = sums + plane
        fall += tl.load(more + upper * K + column).to(tl.float32) - tl.load(more + lower * K + column).to(tl.float32)
    return fall
