"""Shared by the scan's kernels: halves of a state's dims, of rotated rows of B and C, and of intermediates between kernels.

Each half has S of the dims, the pairs that angles rotate, the two dims of a pair in neighbouring columns. Angles rotate `TURNS` halves: the
second one only where there are more than S // 2 angles. `cosines` and `sines` [B, H, T, N] have those of each position's angles.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import computed_once, narrow, prefetch_rows, widen


@triton.jit  # type: ignore[untyped-decorator]
def load_pairs(at, there, state_width, S: tl.constexpr, NEIGHBOURS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and second dims of the pairs of one half of each row, [rows, S // 2] each, fp32, from the rows' addresses."""
    if NEIGHBOURS:
        dim = HALF * S + tl.arange(0, S)
        whole = widen(tl.load(at[:, None] + dim[None, :], mask=there[:, None] & (dim < state_width)[None, :], other=0.0))
        return tl.split(tl.reshape(whole, [whole.shape[0], S // 2, 2]))
    else:  # noqa: RET505  one branch is compiled
        pair, half = HALF * (S // 2) + tl.arange(0, S // 2), state_width // 2
        first = widen(tl.load(at[:, None] + pair[None, :], mask=there[:, None] & (pair < half)[None, :], other=0.0))
        mask = there[:, None] & (half + pair < state_width)[None, :]
        return first, widen(tl.load(at[:, None] + half + pair[None, :], mask=mask, other=0.0))


@triton.jit  # type: ignore[untyped-decorator]
def load_half(at, there, state_width, S: tl.constexpr, NEIGHBOURS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """One half of each row, [rows, S], fp32, from the rows' addresses."""
    if NEIGHBOURS:
        dim = HALF * S + tl.arange(0, S)
        return widen(tl.load(at[:, None] + dim[None, :], mask=there[:, None] & (dim < state_width)[None, :], other=0.0))
    else:  # noqa: RET505  one branch is compiled
        first, second = load_pairs(at, there, state_width, S=S, NEIGHBOURS=False, HALF=HALF)
        return joined(first, second)


@triton.jit  # type: ignore[untyped-decorator]
def store_pairs(  # type: ignore[no-untyped-def]
    at, first, second, there, state_width, S: tl.constexpr, NEIGHBOURS: tl.constexpr, HALF: tl.constexpr
):
    """Stores one half of each row, rounded, from the first and second dims of its pairs."""
    dtype = at.dtype.element_ty
    if NEIGHBOURS:
        dim = HALF * S + tl.arange(0, S)
        tl.store(at[:, None] + dim[None, :], narrow(joined(first, second), dtype), mask=there[:, None] & (dim < state_width)[None, :])
    else:
        pair, half = HALF * (S // 2) + tl.arange(0, S // 2), state_width // 2
        tl.store(at[:, None] + pair[None, :], narrow(first, dtype), mask=there[:, None] & (pair < half)[None, :])
        mask = there[:, None] & (half + pair < state_width)[None, :]
        tl.store(at[:, None] + half + pair[None, :], narrow(second, dtype), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def store_half(at, rows, there, state_width, S: tl.constexpr, NEIGHBOURS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores one half of each row, [rows, S], rounded."""
    if NEIGHBOURS:
        dim = HALF * S + tl.arange(0, S)
        tl.store(at[:, None] + dim[None, :], narrow(rows, at.dtype.element_ty), mask=there[:, None] & (dim < state_width)[None, :])
    else:
        first, second = pairs_in(rows)
        store_pairs(at, first, second, there, state_width, S=S, NEIGHBOURS=False, HALF=HALF)


@triton.jit
def joined(first, second):  # type: ignore[no-untyped-def]
    """A half [rows, S] from the first and second columns [rows, S // 2] of its pairs."""
    return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def pairs_in(rows):  # type: ignore[no-untyped-def]
    """First and second columns [rows, S // 2] of the pairs of a half [rows, S]."""
    return tl.split(tl.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]))


@triton.jit  # type: ignore[untyped-decorator]
def load_part(at, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """One half of each row [rows, S] of what a kernel stored for another, in halves of S columns each, from the rows' addresses."""
    return tl.load(at[:, None] + HALF * S + tl.arange(0, S)[None, :], mask=there[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_part(at, rows, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores one half of each row, rounded, as `load_part` reads it."""
    out = at[:, None] + HALF * S + tl.arange(0, S)[None, :]
    tl.store(out, narrow(rows, at.dtype.element_ty), mask=there[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def load_parted(at, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and second dims of the pairs of one half of each row, [rows, S // 2] each, fp32, as `store_parted` wrote them."""
    first = at[:, None] + HALF * S + tl.arange(0, S // 2)[None, :]
    return widen(tl.load(first, mask=there[:, None], other=0.0)), widen(tl.load(first + S // 2, mask=there[:, None], other=0.0))


@triton.jit  # type: ignore[untyped-decorator]
def store_parted(at, rows, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores one half of each row, rounded: the first dims of its pairs, then the second."""
    first, second = pairs_in(rows)
    out = at[:, None] + HALF * S + tl.arange(0, S // 2)[None, :]
    tl.store(out, narrow(first, at.dtype.element_ty), mask=there[:, None])
    tl.store(out + S // 2, narrow(second, at.dtype.element_ty), mask=there[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def cos_sin(  # type: ignore[no-untyped-def]
    cosines, sines, batch, head, position, valid, num_positions, num_heads, num_angles, S: tl.constexpr, HALF: tl.constexpr
):
    """Cosine and sine of each row's angles of one half, [M, S // 2]; 1 and 0 beyond the last angle."""
    pair = HALF * (S // 2) + tl.arange(0, S // 2)
    at = ((batch * num_heads + head) * num_positions + position)[:, None] * num_angles + pair[None, :]
    mask = valid[:, None] & (pair < num_angles)[None, :]
    return tl.load(cosines + at, mask=mask, other=1.0).to(tl.float32), tl.load(sines + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_steps(  # type: ignore[no-untyped-def]
    tables, angles, batch, head, position, sizes, num_rows, S: tl.constexpr, TURNS: tl.constexpr, HALF: tl.constexpr
):
    """Asks for the coefficients and the angles of one half of positions that the program reads next."""
    num_positions, num_heads, _rank_count, _state_width, num_angles = sizes
    there = (position >= 0) & (position < num_positions)
    at = (batch * num_heads + head) * num_positions + position
    prefetch_rows(tables + num_rows + at, there, tables, WIDTH=1)
    prefetch_rows(tables + 2 * num_rows + at, there, tables, WIDTH=1)
    if HALF < TURNS:
        for index in tl.static_range(2):
            prefetch_rows(angles[index] + at * num_angles + HALF * (S // 2), there, angles[index], WIDTH=S // 2)


@triton.jit  # type: ignore[untyped-decorator]
def turned_half(  # type: ignore[no-untyped-def]
    whole, bias, angles, row_places, sizes, strides,
    R: tl.constexpr, S: tl.constexpr, NEIGHBOURS: tl.constexpr, TURNS: tl.constexpr, HALF: tl.constexpr, ONCE: tl.constexpr = False,
):  # fmt: skip
    """One half of the rows of B or C with the head's bias, rotated: [M, S].

    `angles` are cosines and sines; `row_places` batch, head and group, and of each row its position, its rank and whether it exists;
    `sizes` positions, heads, ranks, dims and angles; `strides` those of B and C.
    Rows that do not exist are finite: they are multiplied by weights, values or gradients of zero. `ONCE` is for the first operand of a
    product, which the compiler would otherwise make twice, once in the registers that the product reads.
    """
    cosines, sines = angles
    batch, head, group, position, rank, valid = row_places
    num_positions, num_heads, rank_count, state_width, num_angles = sizes
    stride_b, stride_t, stride_r, stride_g = strides
    M: tl.constexpr = position.shape[0]
    at = whole + batch * stride_b + group * stride_g + position.to(tl.int64) * stride_t + rank * stride_r
    one, other = load_pairs(at, valid, state_width, S=S, NEIGHBOURS=NEIGHBOURS, HALF=HALF)
    # the ranks of one half of the rows, repeated by the threads of the other half, in the layout of the rows: threads exchange nothing
    row = tl.arange(0, M // 2)
    near = bias + (head * rank_count + row % R) * state_width
    more, more_other = load_pairs(near, row % R < rank_count, state_width, S=S, NEIGHBOURS=NEIGHBOURS, HALF=HALF)
    one = tl.reshape(tl.reshape(one, [2, M // 2, S // 2]) + more[None, :, :], [M, S // 2])
    other = tl.reshape(tl.reshape(other, [2, M // 2, S // 2]) + more_other[None, :, :], [M, S // 2])
    if HALF < TURNS:
        cos, sin = cos_sin(cosines, sines, batch, head, position, valid, num_positions, num_heads, num_angles, S=S, HALF=HALF)
        one, other = one * cos - other * sin, one * sin + other * cos
    if ONCE:
        one, other = computed_once(one), computed_once(other)
    return joined(one, other)


@triton.jit  # type: ignore[untyped-decorator]
def turned_rows(  # type: ignore[no-untyped-def]
    whole, bias, angles, row_places, sizes, strides,
    R: tl.constexpr, S: tl.constexpr, NEIGHBOURS: tl.constexpr, TURNS: tl.constexpr, ONCE: tl.constexpr = False,
):  # fmt: skip
    """Both halves, as described in `turned_half`."""
    one = turned_half(whole, bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=NEIGHBOURS, TURNS=TURNS, HALF=0, ONCE=ONCE)
    other = turned_half(whole, bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=NEIGHBOURS, TURNS=TURNS, HALF=1, ONCE=ONCE)
    return one, other


@triton.jit  # type: ignore[untyped-decorator]
def back_turn(grad, at, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient [S // 2] of an angle that turns back all rows of one half [rows, S] of a stored matrix, from the gradient of that half."""
    first, second = pairs_in(widen(load_part(at, there, S=S, HALF=HALF)))
    grad_first, grad_second = pairs_in(grad)
    return tl.sum(grad_first * second - grad_second * first, 0)


@triton.jit  # type: ignore[untyped-decorator]
def turning(grad, at, there, S: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of each row's angles of one half, [M, S // 2], from that of the rotated row, and the stored row."""
    first, second = load_parted(at, there, S=S, HALF=HALF)
    grad_first, grad_second = pairs_in(grad)
    return grad_second * first - grad_first * second
