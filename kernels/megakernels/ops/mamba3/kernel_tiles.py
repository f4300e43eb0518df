"""Shared by the scan's kernels: rows, decays and rotated keys of a tile.

A tile has Q positions, M = Q · R rows: R ranks of each position, of which those beyond the model's rank are empty. A state's dims are held
in two halves, the first and the second dims of the pairs that angles rotate. `tables` [4, B, H, T] has γ, w, and the running sum of log
decays of each position's tile as two fp32 numbers, the rounded sum and the rest; `cosines` and `sines` [B, H, T, N] those of its angles.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import exp, narrow, softplus, widen

PI = tl.constexpr(3.141592653589793)
TURN_HIGH, TURN_LOW = tl.constexpr(6.28125), tl.constexpr(0.0019353071795864769)
"""2π in two parts; the first has so few bits that its multiples are exact."""
PER_TURN = tl.constexpr(0.15915494309189535)
SLOWEST_RATE = tl.constexpr(1e-4)


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
    tables,
    starts,
    batch,
    head,
    position,
    valid,
    first,
    last,
    num_positions,
    num_heads,
    num_rows,
    HAS_STARTS: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Per row γ, w, its first visible position, the decays from the tile's start and to its end, running sums; and the decay across it.

    Decays between documents are 0. With `PRECISE` sums are two fp32 numbers: the difference of two has no more rounding than a sum over
    the span.
    """
    row = tables + (batch * num_heads + head) * num_positions
    gamma = tl.load(row + position, mask=valid, other=0.0).to(tl.float32)
    arrived = tl.load(row + num_rows + position, mask=valid, other=0.0).to(tl.float32)
    sums = tl.load(row + 2 * num_rows + position, mask=valid, other=0.0).to(tl.float32)
    total = tl.load(row + 2 * num_rows + last).to(tl.float32)
    rests, fall = tl.zeros_like(sums), total - sums
    if PRECISE:
        rests = tl.load(row + 3 * num_rows + position, mask=valid, other=0.0).to(tl.float32)
        fall += tl.load(row + 3 * num_rows + last).to(tl.float32) - rests
    from_start, to_end, across = exp(sums), exp(fall), exp(total)
    seen = tl.zeros_like(position)
    if HAS_STARTS:
        seen = tl.load(starts + batch * num_positions + position, mask=valid, other=0)
        end = tl.load(starts + batch * num_positions + last)
        from_start = tl.where(seen < first, from_start, 0.0)
        to_end = tl.where(position >= end, to_end, 0.0)
        across = tl.where(end < first, across, 0.0)
    return gamma, arrived, seen, tl.where(valid, from_start, 0.0), tl.where(valid, to_end, 0.0), sums, rests, across


@triton.jit  # type: ignore[untyped-decorator]
def pairs_of(sums, rests, position, seen, valid, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The decay of each pair of rows from the earlier position to the later one, else 0; and which pairs share a position.

    Masked before it is exponentiated. Rows of the result are queries, with `KEYS` keys.
    """
    later = tl.where(valid, sums, float("-inf"))
    if KEYS:
        earlier = position[None, :] > position[:, None]
        fall = later[None, :] - sums[:, None]
        if PRECISE:
            fall += rests[None, :] - rests[:, None]
        if HAS_STARTS:
            earlier &= position[:, None] >= seen[None, :]
    else:
        earlier = position[:, None] > position[None, :]
        fall = later[:, None] - sums[None, :]
        if PRECISE:
            fall += rests[:, None] - rests[None, :]
        if HAS_STARTS:
            earlier &= position[None, :] >= seen[:, None]
    return exp(tl.where(earlier, fall, float("-inf"))), position[:, None] == position[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def load_halves(at, there, state_width, S: tl.constexpr, NEIGHBOURS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and second dims of the pairs of each row, [rows, S] each, fp32, from the rows' addresses."""
    if NEIGHBOURS:
        dim = tl.arange(0, 2 * S)
        whole = widen(tl.load(at[:, None] + dim[None, :], mask=there[:, None] & (dim < state_width)[None, :], other=0.0))
        return tl.split(tl.reshape(whole, [whole.shape[0], S, 2]))
    else:  # noqa: RET505  one branch is compiled
        pair, half = tl.arange(0, S), state_width // 2
        one = widen(tl.load(at[:, None] + pair[None, :], mask=there[:, None] & (pair < half)[None, :], other=0.0))
        mask = there[:, None] & (half + pair < state_width)[None, :]
        return one, widen(tl.load(at[:, None] + half + pair[None, :], mask=mask, other=0.0))


@triton.jit  # type: ignore[untyped-decorator]
def store_halves(at, one, other, there, state_width, S: tl.constexpr, NEIGHBOURS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores rows whose halves are given, rounded."""
    dtype = at.dtype.element_ty
    if NEIGHBOURS:
        dim, whole = tl.arange(0, 2 * S), tl.reshape(tl.join(one, other), [one.shape[0], 2 * S])
        tl.store(at[:, None] + dim[None, :], narrow(whole, dtype), mask=there[:, None] & (dim < state_width)[None, :])
    else:
        pair, half = tl.arange(0, S), state_width // 2
        tl.store(at[:, None] + pair[None, :], narrow(one, dtype), mask=there[:, None] & (pair < half)[None, :])
        mask = there[:, None] & (half + pair < state_width)[None, :]
        tl.store(at[:, None] + half + pair[None, :], narrow(other, dtype), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def add_halves(at, one, other, there, state_width, S: tl.constexpr, NEIGHBOURS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds rows to those in memory, which no other program writes."""
    before_one, before_other = load_halves(at, there, state_width, S=S, NEIGHBOURS=NEIGHBOURS)
    store_halves(at, before_one + one, before_other + other, there, state_width, S=S, NEIGHBOURS=NEIGHBOURS)


@triton.jit  # type: ignore[untyped-decorator]
def load_part(at, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """One half of each row [rows, S] of what a kernel stored for another, in halves of S columns each, from the rows' addresses."""
    return tl.load(at[:, None] + HALF * S + tl.arange(0, S)[None, :], mask=there[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_part(at, rows, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores one half of each row, rounded, as `load_part` reads it."""
    out = at[:, None] + HALF * S + tl.arange(0, S)[None, :]
    tl.store(out, narrow(rows, at.dtype.element_ty), mask=there[:, None])


@triton.jit
def accumulate(pointer, values, mask):  # type: ignore[no-untyped-def]
    """Adds to what is in memory, which no other program writes."""
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


@triton.jit  # type: ignore[untyped-decorator]
def cos_sin(  # type: ignore[no-untyped-def]
    cosines, sines, batch, head, position, valid, num_positions, num_heads, num_angles, S: tl.constexpr
):
    """Cosine and sine of each row's angles, [M, S]; 1 and 0 beyond the last angle."""
    pair = tl.arange(0, S)
    at = ((batch * num_heads + head) * num_positions + position)[:, None] * num_angles + pair[None, :]
    mask = valid[:, None] & (pair < num_angles)[None, :]
    return tl.load(cosines + at, mask=mask, other=1.0).to(tl.float32), tl.load(sines + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def turned_rows(  # type: ignore[no-untyped-def]
    whole,
    bias,
    cosines,
    sines,
    batch,
    head,
    group,
    position,
    rank,
    valid,
    first,
    stop,
    num_positions,
    num_heads,
    rank_count,
    state_width,
    num_angles,
    stride_b,
    stride_t,
    stride_r,
    stride_g,
    R: tl.constexpr,
    S: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ROTATES: tl.constexpr,
    SELECTS: tl.constexpr = False,
):
    """Rows of B or C with the head's bias, rotated: first and second dims of the pairs, [M, S] each.

    Rows that do not exist are finite, and zero only with `SELECTS`: what they meet, weights, values or gradients, is zero. The first
    operand of a product needs it: from elementwise operations alone the compiler would make that one twice, once in the registers that the
    product reads.
    """
    M: tl.constexpr = position.shape[0]
    at = whole + batch * stride_b + group * stride_g + position.to(tl.int64) * stride_t + rank * stride_r
    one, other = load_halves(at, valid, state_width, S=S, NEIGHBOURS=NEIGHBOURS)
    ranks = tl.arange(0, R)
    near = bias + (head * rank_count + ranks) * state_width
    more, more_other = load_halves(near, ranks < rank_count, state_width, S=S, NEIGHBOURS=NEIGHBOURS)
    one = tl.reshape(one, [M // R, R, S]) + more[None, :, :]
    other = tl.reshape(other, [M // R, R, S]) + more_other[None, :, :]
    if ROTATES:
        each = first + tl.arange(0, M // R)
        cos, sin = cos_sin(cosines, sines, batch, head, each, each < stop, num_positions, num_heads, num_angles, S=S)
        cos, sin = cos[:, None, :], sin[:, None, :]
        one, other = one * cos - other * sin, one * sin + other * cos
    if SELECTS:
        there = tl.reshape(valid, [M // R, R])[:, :, None]
        one, other = tl.where(there, one, 0.0), tl.where(there, other, 0.0)
    return tl.reshape(one, [M, S]), tl.reshape(other, [M, S])


@triton.jit
def head_rows(pointer, batch, head, position, valid, column, head_width, stride_b, stride_t, stride_h):  # type: ignore[no-untyped-def]
    """Columns of the rows of x, z or the gradient of y, [M, columns], fp32."""
    at = pointer + batch * stride_b + head * stride_h + position.to(tl.int64)[:, None] * stride_t + column[None, :]
    return widen(tl.load(at, mask=valid[:, None] & (column < head_width)[None, :], other=0.0))


@triton.jit
def mimo_rows(weight, head, rank, rank_count, column, head_width):  # type: ignore[no-untyped-def]
    """Columns of a rank projection's row of each row of a tile, [M, columns], fp32."""
    mask = (rank < rank_count)[:, None] & (column < head_width)[None, :]
    return widen(tl.load(weight + ((head * rank_count + rank) * head_width)[:, None] + column[None, :], mask=mask, other=0.0))
