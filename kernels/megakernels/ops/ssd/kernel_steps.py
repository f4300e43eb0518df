"""The scan's backward kernel of steps: gradients of dt and of the parameters of heads."""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow
from megakernels.ops.ssd.kernel_tiles import span_of, steps_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_step_kernel(  # type: ignore[no-untyped-def]
    dt, A_log, dt_bias, of_steps, of_decays, reads, across, passed, skips, grad_dt, shares, num_positions, num_blocks: tl.constexpr,
    chunk_size: tl.constexpr, tiles_per_chunk: tl.constexpr, num_heads: tl.constexpr, num_rows,
    dt_stride_b, dt_stride_t: tl.constexpr, dt_stride_h: tl.constexpr,
    dt_min, dt_max,
    H: tl.constexpr, Q: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Gradients of dt of one tile of positions and H heads, and their shares [B, tiles, 3, H] of those of A_log, D and dt_bias."""
    tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_tiles, num_sequences = tl.num_programs(0), tl.num_programs(2)
    head = tl.program_id(1) * H + tl.arange(0, H)
    in_h = head < num_heads
    first, stop = span_of(tile // tiles_per_chunk, tile % tiles_per_chunk, chunk_size, num_positions, Q=Q)
    position = first + tl.arange(0, Q)
    valid = in_h[:, None] & (position < stop)[None, :]
    exists = head < tl.where(first < stop, num_heads, 0)
    at = dt + batch * dt_stride_b + head.to(tl.int64)[:, None] * dt_stride_h + position.to(tl.int64)[None, :] * dt_stride_t
    bias = tl.load(dt_bias + head, mask=in_h, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head, mask=in_h, other=0.0).to(tl.float32))
    step, slope = steps_of(tl.load(at, mask=valid, other=0.0).to(tl.float32) + bias[:, None], dt_min, dt_max)
    place = (batch * num_heads + head[:, None]) * num_positions + position[None, :]
    zeros = tl.zeros([H, Q], dtype=tl.float32)
    row = (batch * num_tiles + tile) * num_heads + head
    kept, read, decays, direct = zeros, zeros, zeros, zeros
    skip = tl.zeros([H], dtype=tl.float32)
    for block in range(num_blocks):
        here, of_tile = block * num_rows + place, block * num_sequences * num_tiles * num_heads + row
        kept += tl.load(of_decays + here, mask=valid, other=0.0).to(tl.float32)
        read += tl.load(reads + here, mask=valid, other=0.0).to(tl.float32)
        if PRECISE:
            decays += tl.load(across + here, mask=valid, other=0.0).to(tl.float32)
        decays += tl.load(passed + of_tile, mask=exists, other=0.0).to(tl.float32)[:, None]
        direct += tl.load(of_steps + here, mask=valid, other=0.0).to(tl.float32)
        skip += tl.load(skips + of_tile, mask=exists, other=0.0).to(tl.float32)
    decays = tl.where(valid, decays + (tl.cumsum(kept, 1) - kept) + tl.cumsum(read, 1, reverse=True), 0.0)
    raw = tl.where(valid, (direct + rate[:, None] * decays) * slope, 0.0)
    out = grad_dt + (batch * num_positions + position[None, :]) * num_heads + head[:, None]
    tl.store(out, narrow(raw, grad_dt.dtype.element_ty), mask=valid)
    share = shares + (batch * num_tiles + tile) * 3 * num_heads + head
    tl.store(share, tl.sum(rate[:, None] * step * decays, 1), mask=in_h)
    tl.store(share + num_heads, skip, mask=in_h)
    tl.store(share + 2 * num_heads, tl.sum(raw, 1), mask=in_h)
