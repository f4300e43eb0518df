"""The last backward kernels: sums of the angles' gradients over later positions, then gradients of dt, A, trapezoid and the angles."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, sigmoid, softplus, tanh
from megakernels.ops.mamba3.kernel_tables import rate_of
from megakernels.ops.mamba3.kernel_tiles import PI, SLOWEST_RATE


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_last_phase_kernel(  # type: ignore[no-untyped-def]
    turned, grad_final, starts, ends, of_last, first, num_positions, num_heads, num_angles, num_tiles, last_tile,
    T: tl.constexpr, N: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """The part of the angles' gradients that depends on the angle after the sequence alone: `of_last` [B, H, N], of tiles before the last.

    `first` is the last tile's first position; the part is 0 if the last document begins in that tile.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    angle, position = tl.arange(0, N), first + tl.arange(0, T)
    in_n = angle < num_angles
    row = batch * num_heads + head
    at = turned + (row * num_positions + position)[:, None] * num_angles + angle[None, :]
    own = tl.load(at, mask=(position < num_positions)[:, None] & in_n[None, :], other=0.0).to(tl.float32)
    end_row = (batch * num_tiles + last_tile) * num_heads + head
    rest = tl.sum(own, 0) - tl.load(ends + end_row * num_angles + angle, mask=in_n, other=0.0).to(tl.float32)
    rest += tl.load(grad_final + row * num_angles + angle, mask=in_n, other=0.0).to(tl.float32)
    if HAS_STARTS:
        rest = tl.where(tl.load(starts + batch * num_positions + num_positions - 1) < first, rest, 0.0)
    tl.store(of_last + row * num_angles + angle, rest, mask=in_n)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_phase_gradient_kernel(  # type: ignore[no-untyped-def]
    turned, grad_final, starts, ends, of_last, grad_initial, num_positions, num_heads, num_angles, save_every, tiles, num_tiles,
    Q: tl.constexpr, T: tl.constexpr, N: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """Sums over the later positions of the same document, in place: a tile's rows of `turned` [B, H, T, N] of one sequence and head.

    A position's rotation is part of its own angle and of all later ones. Of those after the tile the sum is in `ends` and `of_last`: a sum
    over all positions would keep the rounding of terms that cancel. `grad_initial` is the gradient of the angle before the sequence.
    """
    index, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    angle, in_tile = tl.arange(0, N), tl.arange(0, T)
    in_n = angle < num_angles
    row = batch * num_heads + head
    first = index // tiles * save_every + index % tiles * Q
    stop = tl.minimum(tl.minimum(first + Q, (index // tiles + 1) * save_every), num_positions)
    position = first + in_tile
    valid = position < stop
    at = turned + (row * num_positions + position)[:, None] * num_angles + angle[None, :]
    mask = valid[:, None] & in_n[None, :]
    own = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at_end = ends + ((batch * num_tiles + index) * num_heads + head) * num_angles + angle
    has_next = stop < num_positions
    later = tl.load(at_end + num_heads * num_angles, mask=tl.where(in_n, has_next, False), other=0.0).to(tl.float32)
    following = first
    if HAS_STARTS:
        following = tl.load(starts + batch * num_positions + tl.minimum(stop, num_positions - 1))
    rest = tl.zeros([N], dtype=tl.float32)
    if HAS_FINAL:
        rest = tl.load(of_last + row * num_angles + angle, mask=in_n, other=0.0).to(tl.float32)
        after = rest
        if HAS_STARTS:
            last_start = tl.load(starts + batch * num_positions + num_positions - 1)
            after = tl.where(following == last_start, after, 0.0)
            rest = tl.where(last_start < 0, rest, 0.0)
        final = tl.load(grad_final + row * num_angles + angle, mask=in_n, other=0.0).to(tl.float32)
        later += tl.where(has_next, after, final)
    if HAS_STARTS:
        seen = tl.load(starts + batch * num_positions + position, mask=valid, other=0)
        included = (position[None, :] >= position[:, None]) & (seen[None, :] <= position[:, None])
        carried = tl.where((position >= following)[:, None], later[None, :], 0.0)
        sums = dot(tl.where(included, 1.0, 0.0), own) + carried
    else:
        sums = tl.cumsum(own, 0, reverse=True) + later[None, :]
    tl.store(at, sums, mask=mask)
    if index == 0:
        before = tl.load(at_end, mask=in_n, other=0.0).to(tl.float32) + rest
        tl.store(grad_initial + row * num_angles + angle, before, mask=in_n)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_step_gradient_kernel(  # type: ignore[no-untyped-def]
    turned, steps, dt, A, trapezoid, angles, dt_bias, starts, grad_dt, grad_A, grad_trapezoid, grad_angles, shares, num_positions,
    num_heads, num_angles,
    dt_stride_b, dt_stride_t, dt_stride_h, angle_stride_b, angle_stride_t,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, HAS_STARTS: tl.constexpr, HEAVY_TAIL: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """A tile of positions of one sequence, all heads; `shares` [B, tiles, H] has the sums of the gradients of dt over its positions.

    `steps` [3, B, H, T] has the gradients of γ + w, of w and of log decays.
    """
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tile * T + tl.arange(0, T)
    valid = position < num_positions
    angle = tl.arange(0, N)
    in_angles = valid[:, None] & (angle < num_angles)[None, :]
    of_angles = tl.zeros([T, N], dtype=tl.float32)
    if ROTATES:
        at = angles + batch * angle_stride_b + position.to(tl.int64)[:, None] * angle_stride_t + angle[None, :]
        turn = tanh(tl.load(at, mask=in_angles, other=0.0).to(tl.float32))
    follows = valid & (position > 0)
    if HAS_STARTS:
        starts_at = starts + batch * num_positions + position
        follows &= tl.load(starts_at, mask=follows, other=0) == tl.load(starts_at - 1, mask=follows, other=-1)
    plane = tl.num_programs(1).to(tl.int64) * num_positions * num_heads
    for begin in range(0, num_heads, H):
        head = begin + tl.arange(0, H)
        in_h = head < num_heads
        mask = valid[:, None] & in_h[None, :]
        place = (batch * num_positions + position)[:, None] * num_heads + head[None, :]
        at_input = batch * dt_stride_b + position.to(tl.int64)[:, None] * dt_stride_t + head.to(tl.int64)[None, :] * dt_stride_h
        raw = tl.load(dt + at_input, mask=mask, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias + head, mask=in_h, other=0.0).to(tl.float32)[None, :]
        step = softplus(raw)
        raw_rate = tl.load(A + at_input, mask=mask, other=0.0).to(tl.float32)
        unbounded, slope = rate_of(raw_rate, HEAVY_TAIL=HEAVY_TAIL)
        rate = tl.maximum(unbounded, SLOWEST_RATE)
        slope = tl.where(unbounded < SLOWEST_RATE, 0.0, slope)
        share = sigmoid(tl.load(trapezoid + at_input, mask=mask, other=0.0).to(tl.float32))
        at_step = (batch * num_heads + head[None, :]) * num_positions + position[:, None]
        gamma = tl.load(steps + at_step, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(steps + plane + at_step - 1, mask=follows[:, None] & in_h[None, :], other=0.0).to(tl.float32)
        log_decay = tl.load(steps + 2 * plane + at_step, mask=mask, other=0.0).to(tl.float32)
        of_step = share * gamma - rate * log_decay + (1.0 - share) * before
        if ROTATES:
            at_turn = at_step[:, :, None] * num_angles + angle[None, None, :]
            later = tl.load(turned + at_turn, mask=mask[:, :, None] & (angle < num_angles)[None, None, :], other=0.0).to(tl.float32)
            of_step += tl.sum(later * turn[:, None, :], 2) * PI
            of_angles += tl.sum(later * step[:, :, None], 1)
        of_dt = tl.where(mask, of_step * sigmoid(raw), 0.0)
        tl.store(grad_dt + place, narrow(of_dt, grad_dt.dtype.element_ty), mask=mask)
        tl.store(grad_A + place, narrow(-step * log_decay * slope, grad_A.dtype.element_ty), mask=mask)
        of_share = step * (gamma - before) * share * (1.0 - share)
        tl.store(grad_trapezoid + place, narrow(of_share, grad_trapezoid.dtype.element_ty), mask=mask)
        tl.store(shares + (batch * tl.num_programs(0) + tile) * num_heads + head, tl.sum(of_dt, 0), mask=in_h)
    if ROTATES:
        out = grad_angles + (batch * num_positions + position)[:, None] * num_angles + angle[None, :]
        tl.store(out, narrow((1.0 - turn * turn) * of_angles * PI, grad_angles.dtype.element_ty), mask=in_angles)
