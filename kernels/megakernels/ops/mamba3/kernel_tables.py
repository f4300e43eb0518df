"""Tables that the scan's kernels read: coefficients and decays of every position and head, and the cosines and sines of its angles."""

import triton
import triton.language as tl

from megakernels._common.tiles import cos_sin_within, narrow, sigmoid, softplus, tanh
from megakernels.ops.mamba3.kernel_tiles import PER_TURN, PI, SLOWEST_RATE, TURN_HIGH, TURN_LOW, steps_of


@triton.jit  # type: ignore[untyped-decorator]
def rate_of(raw, HEAVY_TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rate before its lower bound, and its derivative."""
    if HEAVY_TAIL:
        below = 1.0 / (1.0 - tl.minimum(raw, 0.0))
        return tl.maximum(raw, 0.0) + below, below * below
    else:  # noqa: RET505  one branch is compiled
        return softplus(raw), sigmoid(raw)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_table_kernel(  # type: ignore[no-untyped-def]
    dt, A, trapezoid, dt_bias, starts, ahead, tables, num_positions, num_heads, save_every, num_rows,
    dt_stride_b, dt_stride_t, dt_stride_h,
    H: tl.constexpr, Q: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_AHEAD: tl.constexpr, HEAVY_TAIL: tl.constexpr,
):  # fmt: skip
    """One segment of a sequence, H heads, tile by tile: γ, w, and the running sums of log decays within each tile."""
    segment, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    in_h = head < num_heads
    bias = tl.load(dt_bias + head, mask=in_h, other=0.0).to(tl.float32)[:, None]
    begin = segment * save_every
    stop = tl.minimum(begin + save_every, num_positions)
    for first in range(begin, stop, Q):
        position = first + tl.arange(0, Q)
        there = position < stop
        valid = in_h[:, None] & there[None, :]
        place = batch * dt_stride_b + head.to(tl.int64)[:, None] * dt_stride_h + position.to(tl.int64)[None, :] * dt_stride_t
        step = steps_of(tl.load(dt + place, mask=valid, other=0.0).to(tl.float32), bias, valid)
        unbounded, _slope = rate_of(tl.load(A + place, mask=valid, other=0.0).to(tl.float32), HEAVY_TAIL=HEAVY_TAIL)
        gamma = sigmoid(tl.load(trapezoid + place, mask=valid, other=0.0).to(tl.float32)) * step
        follows = there & (position + 1 < num_positions)
        if HAS_STARTS:
            starts_at = starts + batch * num_positions + position
            follows &= tl.load(starts_at, mask=follows, other=0) == tl.load(starts_at + 1, mask=follows, other=-1)
        follows = in_h[:, None] & follows[None, :]
        later = steps_of(tl.load(dt + place + dt_stride_t, mask=follows, other=0.0).to(tl.float32), bias, follows)
        share = sigmoid(tl.load(trapezoid + place + dt_stride_t, mask=follows, other=0.0).to(tl.float32))
        arrived = gamma + (1.0 - share) * later
        if HAS_AHEAD:
            last = tl.load(ahead + batch * num_heads + head, mask=in_h, other=0.0).to(tl.float32)
            arrived += tl.where((position + 1 == num_positions)[None, :], last[:, None], 0.0)
        log_decay = -tl.maximum(unbounded, SLOWEST_RATE) * step
        wide = tl.cumsum(log_decay.to(tl.float64), 1)
        sums = wide.to(tl.float32)
        out = tables + (batch * num_heads + head[:, None]) * num_positions + position[None, :]
        tl.store(out, gamma, mask=valid)
        tl.store(out + num_rows, arrived, mask=valid)
        tl.store(out + 2 * num_rows, sums, mask=valid)
        tl.store(out + 3 * num_rows, (wide - sums.to(tl.float64)).to(tl.float32), mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_turn_kernel(  # type: ignore[no-untyped-def]
    angles, turns, num_positions, num_angles,
    angle_stride_b, angle_stride_t,
    T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """π tanh(angles) of T positions of a sequence, `turns` [B, positions, N], which all heads share."""
    batch, position, angle = tl.program_id(1).to(tl.int64), tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, N)
    mask = (position < num_positions)[:, None] & (angle < num_angles)[None, :]
    at = angles + batch * angle_stride_b + position.to(tl.int64)[:, None] * angle_stride_t + angle[None, :]
    out = turns + (batch * num_positions + position)[:, None] * num_angles + angle[None, :]
    tl.store(out, tanh(tl.load(at, mask=mask, other=0.0).to(tl.float32)) * PI, mask=mask)


@triton.jit
def within_half_turn(angle):  # type: ignore[no-untyped-def]
    """The same angle in [−π, π]."""
    whole = tl.floor(angle * PER_TURN + 0.5)
    return (angle - whole * TURN_HIGH) - whole * TURN_LOW


@triton.jit
def cos_sin_of(angle):  # type: ignore[no-untyped-def]
    """Cosine and sine to fp32's rounding of 1, of some half turns: series of the angle less whole half turns, in [−π/2, π/2]."""
    whole = tl.floor(angle * (2.0 * PER_TURN) + 0.5)
    rest = (angle - whole * (0.5 * TURN_HIGH)) - whole * (0.5 * TURN_LOW)
    sign = 1.0 - 2.0 * (whole - 2.0 * tl.floor(0.5 * whole))
    square = rest * rest
    cos = 1.0 - square * (1 / 90) * (1.0 - square * (1 / 132))
    cos = 1.0 - square * (1 / 30) * (1.0 - square * (1 / 56) * cos)
    cos = 1.0 - square * (1 / 2) * (1.0 - square * (1 / 12) * cos)
    sin = 1.0 - square * (1 / 110) * (1.0 - square * (1 / 156))
    sin = 1.0 - square * (1 / 42) * (1.0 - square * (1 / 72) * sin)
    sin = 1.0 - square * (1 / 6) * (1.0 - square * (1 / 20) * sin)
    return sign * cos, sign * (rest * sin)


@triton.jit
def sum_since(total, begins, added, more_begins):  # type: ignore[no-untyped-def]
    """Combines two neighbouring spans: the sum since the last position where a document begins, and whether one begins."""
    return tl.where(more_begins != 0, added, total + added), begins | more_begins


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_angle_kernel(  # type: ignore[no-untyped-def]
    dt, dt_bias, turns, starts, first_phases, cosines, sines, phases, last_phases, num_positions, num_heads, num_angles, save_every,
    num_segments,
    dt_stride_b, dt_stride_t, dt_stride_h,
    T: tl.constexpr, N: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_INITIAL: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of the running sums of turns of one sequence and head, each times its step.

    With `FORWARD` all positions, from the initial angle [B, H, N]; the angle before each segment and after the last is stored too. Without,
    one segment, from the stored angle before it.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    angle, offset = tl.arange(0, N), tl.arange(0, T)
    in_n = angle < num_angles
    bias = tl.load(dt_bias + head).to(tl.float32)
    phase = tl.zeros([N], dtype=tl.float32)
    if FORWARD:
        begin_segment, end_segment = 0, num_segments
        row = batch * num_heads + head
    else:
        begin_segment, end_segment = tl.program_id(2), tl.program_id(2) + 1
        row = (batch * num_segments + begin_segment) * num_heads + head
    if HAS_INITIAL:
        phase = tl.load(first_phases + row * num_angles + angle, mask=in_n, other=0.0).to(tl.float32)
    for segment in range(begin_segment, end_segment):
        begin = segment * save_every
        stop = tl.minimum(begin + save_every, num_positions)
        if FORWARD:
            place = (batch * num_segments + segment) * num_heads + head
            tl.store(phases + place * num_angles + angle, phase, mask=in_n)
        for first in tl.range(begin, stop, T, disable_licm=True):
            position = first + offset
            valid = position < stop
            raw = tl.load(dt + batch * dt_stride_b + head * dt_stride_h + position.to(tl.int64) * dt_stride_t, mask=valid, other=0.0)
            mask = valid[:, None] & in_n[None, :]
            at = turns + (batch * num_positions + position)[:, None] * num_angles + angle[None, :]
            turn = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            added = within_half_turn(turn * steps_of(raw.to(tl.float32), bias, valid)[:, None])
            if HAS_STARTS:
                seen = tl.load(starts + batch * num_positions + position, mask=valid, other=0)
                begins = tl.broadcast_to((seen == position)[:, None], [T, N]).to(tl.int32)
                theta = tl.associative_scan((added, begins), 0, sum_since)[0] + tl.where((seen < first)[:, None], phase[None, :], 0.0)
            else:
                theta = tl.cumsum(added, 0) + phase[None, :]
            if cosines.dtype.element_ty == tl.float16:
                cos, sin = cos_sin_within(within_half_turn(theta))
            else:
                cos, sin = cos_sin_of(theta)
            out = ((batch * num_heads + head) * num_positions + position)[:, None] * num_angles + angle[None, :]
            tl.store(cosines + out, narrow(cos, cosines.dtype.element_ty), mask=mask)
            tl.store(sines + out, narrow(sin, sines.dtype.element_ty), mask=mask)
            end = tl.sum(tl.where((position == tl.minimum(first + T, stop) - 1)[:, None], theta, 0.0), 0)
            whole = tl.floor(end * PER_TURN)
            phase = tl.maximum((end - whole * TURN_HIGH) - whole * TURN_LOW, 0.0)
    if FORWARD:
        tl.store(last_phases + row * num_angles + angle, phase, mask=in_n)
