"""Shared by the scan's kernels: a tile's rows, steps and decays.

`tables` [2 or 3, B, H, T] has each position's step Δ and the running sum of its tile's log decays Δ a, in powers of two; with `PRECISE` a
sum is two fp32 numbers, the rounded sum and the rest.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow, sigmoid, softplus


@triton.jit  # type: ignore[untyped-decorator]
def part_place(  # type: ignore[no-untyped-def]
    first_chunk, tiles_per_chunk, chunk_size, num_positions, heads_per_group, Q: tl.constexpr, SPAN: tl.constexpr
):
    """A program's tile and part of a group's heads: sequence, group, part, tile of the segment, chunk, its tile, first position and end."""
    local_tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    parts = tl.cdiv(heads_per_group, SPAN)
    chunk, tile = first_chunk + local_tile // tiles_per_chunk, local_tile % tiles_per_chunk
    first, stop = span_of(chunk, tile, chunk_size, num_positions, Q=Q)
    return batch, (tl.program_id(1) // parts).to(tl.int64), tl.program_id(1) % parts, local_tile, chunk, tile, first, stop


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(pointer, place, strides, cols, width, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [Q, cols] of a place: a sequence, a head or group, the first position and the end; zero from the end and from `width` on."""
    batch, head, first, stop = place
    stride_t: tl.constexpr = strides[1]
    row = tl.arange(0, Q)
    base = pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2] + first.to(tl.int64) * stride_t
    mask = (row < stop - first)[:, None] & (cols < width)[None, :]
    if stride_t * Q >= 2**31:
        row = row.to(tl.int64)
    return tl.load(base + row[:, None] * stride_t + cols[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(pointer, rows, batch, head, first, stop, num_positions, num_heads: tl.constexpr, cols, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores such rows, rounded, into a contiguous tensor."""
    row = tl.arange(0, rows.shape[0])
    at = pointer + ((batch.to(tl.int64) * num_positions + first) * num_heads + head) * width
    mask = (row < stop - first)[:, None] & (cols < width)[None, :]
    tl.store(at + row[:, None] * (num_heads * width) + cols[None, :], narrow(rows, pointer.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def sums_of(  # type: ignore[no-untyped-def]
    tables, place, num_positions, num_heads, num_rows, Q: tl.constexpr, PRECISE: tl.constexpr
):
    """Steps (0 from the place's end on), running sums and their rests, the sum over the tile and its rest.

    A difference of two sums is (difference of the rounded) + (difference of the rests): the first is exact where the sums are close, and
    where they are not, its rounding is relative to itself. A difference of rounded sums alone has the rounding of the larger sum.
    """
    batch, head, first, stop = place
    row = tables + (batch.to(tl.int64) * num_heads + head) * num_positions + first
    last = stop - first - 1
    local = tl.arange(0, Q)
    here = tl.minimum(local, last)  # rows from `stop` on repeat the last sum, so that no difference overflows
    steps = tl.load(row + local, mask=local <= last, other=0.0).to(tl.float32)
    sums = tl.load(row + num_rows + here).to(tl.float32)
    total = tl.load(row + num_rows + last).to(tl.float32)
    rests, rest = tl.zeros_like(sums), 0.0
    if PRECISE:
        rests = tl.load(row + 2 * num_rows + here).to(tl.float32)
        rest = tl.load(row + 2 * num_rows + last).to(tl.float32)
    return steps, sums, rests, total, rest


@triton.jit  # type: ignore[untyped-decorator]
def falls_of(later, later_rest, earlier, earlier_rest, PRECISE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log decay between two running sums."""
    if PRECISE:
        return (later - earlier) + (later_rest - earlier_rest)
    else:  # noqa: RET505  one branch is compiled
        return later - earlier


@triton.jit  # type: ignore[untyped-decorator]
def edges_of(  # type: ignore[no-untyped-def]
    starts, tile_sums, place, num_positions, Q: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr
):
    """The decays from the tile's start, to its end and across it, from the result of `sums_of`; 0 between documents."""
    batch, _head, first, stop = place
    _steps, sums, rests, total, rest = tile_sums
    from_start, to_end, across = tl.exp2(sums), tl.exp2(falls_of(total, rest, sums, rests, PRECISE=PRECISE)), tl.exp2(total)
    if HAS_STARTS:
        local = tl.arange(0, Q)
        seen = tl.load(starts + batch.to(tl.int64) * num_positions + first + local, mask=local < stop - first, other=0)
        end = tl.load(starts + batch.to(tl.int64) * num_positions + stop - 1)
        from_start = tl.where(seen < first, from_start, 0.0)
        to_end = tl.where(first + local >= end, to_end, 0.0)
        across = tl.where(end < first, across, 0.0)
    return from_start, to_end, across


@triton.jit  # type: ignore[untyped-decorator]
def decays_of(  # type: ignore[no-untyped-def]
    starts, tile_sums, place, num_positions,
    Q: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The decay of each pair of a tile's positions, from the earlier to the later one; 0 between documents, and where keys are later.

    Masked before it is exponentiated. Rows of the result are queries, with `KEYS` keys.
    """
    batch, _head, first, stop = place
    _steps, sums, rests, _total, _rest = tile_sums
    local = tl.arange(0, Q)
    if KEYS:
        visible = local[None, :] >= local[:, None]
        fall = falls_of(sums[None, :], rests[None, :], sums[:, None], rests[:, None], PRECISE=PRECISE)
    else:
        visible = local[:, None] >= local[None, :]
        fall = falls_of(sums[:, None], rests[:, None], sums[None, :], rests[None, :], PRECISE=PRECISE)
    if HAS_STARTS:
        seen = tl.load(starts + batch.to(tl.int64) * num_positions + first + local, mask=local < stop - first, other=0) - first
        if KEYS:
            visible &= local[:, None] >= seen[None, :]
        else:
            visible &= local[None, :] >= seen[:, None]
    return tl.exp2(tl.where(visible, fall, float("-inf")))


@triton.jit
def steps_of(raw, dt_min, dt_max):  # type: ignore[no-untyped-def]
    """The step Δ and its derivative by `raw`: zero outside its limits."""
    unbounded = softplus(raw)
    slope = tl.where((unbounded >= dt_min) & (unbounded <= dt_max), sigmoid(raw), 0.0)
    return tl.minimum(tl.maximum(unbounded, dt_min), dt_max), slope


@triton.jit  # type: ignore[untyped-decorator]
def span_of(chunk, tile, chunk_size, num_positions, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """First position of a chunk's tile, and the position after its last one."""
    begin = chunk * chunk_size
    first = begin + tile * Q
    return first, tl.minimum(tl.minimum(begin + chunk_size, num_positions), first + Q)
