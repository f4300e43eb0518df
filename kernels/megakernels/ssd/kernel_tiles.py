"""What the scan's kernels share: a tile's addresses, steps and decays."""

import triton
import triton.language as tl

from megakernels._common.tiles import softplus


@triton.jit
def sequence_tile(pointer, batch, position, stride_b, stride_t, cols, valid, inside):  # type: ignore[no-untyped-def]
    """Addresses of a tile [positions, cols] of one sequence and head, and what of it exists."""
    place = batch.to(tl.int64) * stride_b + position.to(tl.int64)[:, None] * stride_t + cols[None, :]
    return pointer + place, valid[:, None] & inside[None, :]


@triton.jit
def steps_of(dt, dt_bias, A_log, batch, head, position, valid, dt_stride_b, dt_stride_t, dt_stride_h):  # type: ignore[no-untyped-def]
    """Returns dt + dt_bias, the step Δ (0 where there is no position), the rate a and the running sum of Δ a inside the tile."""
    address = dt + batch.to(tl.int64) * dt_stride_b + position.to(tl.int64) * dt_stride_t + head * dt_stride_h
    raw = tl.load(address, mask=valid, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = tl.where(valid, softplus(raw), 0.0)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    return raw, step, rate, tl.cumsum(step * rate, 0)


@triton.jit  # type: ignore[untyped-decorator]
def ends_of(starts, batch, num_positions, first, last, position, valid, sums, HAS_STARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First position that each one sees, and the decays from the tile's start, to its end and across, 0 between documents.

    Positions beyond the tile's last have step 0, so the last sum is the whole tile's.
    """
    total = tl.min(sums, 0)  # sums only fall
    from_start = tl.exp(sums)
    to_end = tl.where(valid, tl.exp(total - sums), 0.0)
    across = tl.exp(total)
    seen = tl.zeros_like(position)
    if HAS_STARTS:
        seen = tl.load(starts + batch.to(tl.int64) * num_positions + position, mask=valid, other=0)
        end = tl.load(starts + batch.to(tl.int64) * num_positions + last)
        from_start = tl.where(seen < first, from_start, 0.0)
        to_end = tl.where(position >= end, to_end, 0.0)
        across = tl.where(end < first, across, 0.0)
    return seen, tl.where(valid, from_start, 0.0), to_end, across


@triton.jit
def decay_of(sums, position, seen, valid):  # type: ignore[no-untyped-def]
    """exp(c_i − c_j) for pairs j ≤ i of one document, else 0; masked before it is exponentiated."""
    visible = (position[:, None] >= position[None, :]) & (position[None, :] >= seen[:, None]) & valid[:, None]
    return tl.exp(tl.where(visible, sums[:, None] - sums[None, :], float("-inf")))
