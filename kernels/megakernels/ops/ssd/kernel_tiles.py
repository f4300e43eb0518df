"""Shared by the scan's kernels: a tile's addresses, steps and decays."""

import triton
import triton.language as tl

from megakernels._common.tiles import sigmoid, softplus


@triton.jit
def sequence_tile(pointer, batch, position, stride_b, stride_t, cols, valid, inside):  # type: ignore[no-untyped-def]
    """Addresses of a tile [positions, cols] of one sequence and head, and the mask of valid elements."""
    place = batch.to(tl.int64) * stride_b + position.to(tl.int64)[:, None] * stride_t + cols[None, :]
    return pointer + place, valid[:, None] & inside[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def state_of(batch, head, block, num_heads, head_width, state_width, P: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """P columns of a head and the rows of its state: their numbers, which exist, which elements [P, S] do, and where those are.

    The places are within a head's state, and within the states of all heads of all sequences.
    """
    ps, ss = block * P + tl.arange(0, P), tl.arange(0, S)
    in_p, in_s = ps < head_width, ss < state_width
    within = ps[:, None] * state_width + ss[None, :]
    of_head = (batch.to(tl.int64) * num_heads + head) * head_width * state_width + within
    return ps, ss, in_p, in_s, in_p[:, None] & in_s[None, :], within, of_head


@triton.jit
def steps_of(  # type: ignore[no-untyped-def]
    dt, dt_bias, A_log, batch, head, position, valid, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max
):
    """Returns dt + dt_bias, the step Δ (0 where there is no position) and the rate a."""
    address = dt + batch.to(tl.int64) * dt_stride_b + position.to(tl.int64) * dt_stride_t + head * dt_stride_h
    raw = tl.load(address, mask=valid, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = tl.where(valid, tl.minimum(tl.maximum(softplus(raw), dt_min), dt_max), 0.0)
    return raw, step, -tl.exp(tl.load(A_log + head).to(tl.float32))


@triton.jit
def sums_of(step, rate, before):  # type: ignore[no-untyped-def]
    """Running sums of Δ a inside the tile and `before`, each as two fp32 numbers: the rounded sum, and the rest.

    A difference of two sums is (difference of the rounded) + (difference of the rests): the first is exact where the sums are close, and
    where they are not, its rounding is relative to itself. A difference of rounded sums alone has the rounding of the larger sum.
    The third result is the last sum, fp64.
    """
    wide = before + tl.cumsum((step * rate).to(tl.float64), 0)
    rounded = wide.to(tl.float32)
    return rounded, (wide - rounded.to(tl.float64)).to(tl.float32), tl.min(wide, 0)  # sums are non-increasing


@triton.jit
def slope_of(raw, dt_min, dt_max):  # type: ignore[no-untyped-def]
    """The derivative of Δ by dt: zero outside its limits."""
    unbounded = softplus(raw)
    return tl.where((unbounded >= dt_min) & (unbounded <= dt_max), sigmoid(raw), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def ends_of(  # type: ignore[no-untyped-def]
    starts, batch, num_positions, first, last, position, valid, step, rate, HAS_STARTS: tl.constexpr
):
    """First visible position of each, the decays from the tile's start, to its end and across (0 between documents), and sums."""
    sums, rests, total = sums_of(step, rate, 0.0)  # positions out of range have step 0, so the last sum is the tile's total
    rounded = total.to(tl.float32)
    from_start = tl.exp(sums)
    to_end = tl.where(valid, tl.exp((rounded - sums) + ((total - rounded.to(tl.float64)).to(tl.float32) - rests)), 0.0)
    across = tl.exp(rounded)
    seen = tl.zeros_like(position)
    if HAS_STARTS:
        seen = tl.load(starts + batch.to(tl.int64) * num_positions + position, mask=valid, other=0)
        end = tl.load(starts + batch.to(tl.int64) * num_positions + last)
        from_start = tl.where(seen < first, from_start, 0.0)
        to_end = tl.where(position >= end, to_end, 0.0)
        across = tl.where(end < first, across, 0.0)
    return seen, tl.where(valid, from_start, 0.0), to_end, across, sums, rests


@triton.jit
def decay_of(sums, rests, position, seen, valid):  # type: ignore[no-untyped-def]
    """The exponential of the sum of Δ a over (j, i] for pairs j ≤ i of one document, else 0; masked before it is exponentiated."""
    visible = (position[:, None] >= position[None, :]) & (position[None, :] >= seen[:, None]) & valid[:, None]
    fall = (sums[:, None] - sums[None, :]) + (rests[:, None] - rests[None, :])
    return tl.exp(tl.where(visible, fall, float("-inf")))
