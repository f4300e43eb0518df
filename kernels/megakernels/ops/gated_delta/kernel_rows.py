"""The last backward kernels: log decays of each row of a state, and queries and keys before they have unit length."""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow, sigmoid, softplus
from megakernels.ops.gated_delta.kernel_tiles import SIDE, inverse_lengths, row_places, tile_of, tile_place, unit_rows


@triton.jit  # type: ignore[untyped-decorator]
def delta_row_decay_gradient_kernel(  # type: ignore[no-untyped-def]
    decay, A_log, dt_bias, falls, keys, carries, grad_decay, shares, num_positions, num_heads, key_width, save_every, first_segment, tiles,
    all_tiles, plane,
    decay_stride_b, decay_stride_t, decay_stride_h,
    Q: tl.constexpr, K: tl.constexpr, W: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One tile and head: the gradient of decay, and in `shares` [B, tiles, H, 1 + key_width] sums for A_log and dt_bias."""
    tile = tile_place(first_segment, tiles, tl.num_programs(0), save_every, num_positions, num_heads, Q=Q, ROWS=Q)
    batch, head, index, slot, first, stop, row, position, valid = tile
    if first >= stop:
        return
    decay += batch * decay_stride_b + head * decay_stride_h
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    share = shares + ((batch * all_tiles + first_segment * tiles + index) * num_heads + head) * (1 + key_width)
    total = 0.0
    for begin in range(0, K, W):
        column = begin + tl.arange(0, W)
        in_key = column < key_width
        mask = valid[:, None] & in_key[None, :]
        raw = tl.load(row_places(decay, position, decay_stride_t, column), mask=mask, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias + head * key_width + column, mask=in_key, other=0.0).to(tl.float32)[None, :]
        at = (slot * Q + row)[:, None] * K + column[None, :]
        until = tl.load(keys + at).to(tl.float32)
        of_log = tl.cumsum(tl.load(falls + at).to(tl.float32), 0, reverse=True) + (tl.cumsum(until, 0) - until)
        if PRECISE:
            of_log += tl.load(falls + plane + at).to(tl.float32)
        of_log += tl.load(carries + slot * K + column).to(tl.float32)[None, :]
        of_log = tl.where(mask, of_log, 0.0)
        of_raw = of_log * rate * sigmoid(raw)
        total += tl.sum(tl.sum(of_log * rate * softplus(raw), 1), 0)
        out = ((batch * num_positions + position) * num_heads + head)[:, None] * key_width + column[None, :]
        tl.store(grad_decay + out, narrow(of_raw, grad_decay.dtype.element_ty), mask=mask)
        tl.store(share + 1 + column, tl.sum(of_raw, 0), mask=in_key)
    tl.store(share, total)


@triton.jit  # type: ignore[untyped-decorator]
def delta_unit_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, of_queries, of_keys, grad_q, grad_k, num_positions, num_heads, heads_per_group, key_width, save_every, first_segment, tiles,
    num_tiles,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    scale,
    Q: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """16 rows of a tile, one key head: gradients of q and k, from those of their unit rows summed over the group's value heads."""
    blocks: tl.constexpr = Q // SIDE
    index, group, batch = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, stop = tile_of(index, first_segment, tiles, save_every, num_positions, Q=Q)
    row, column = tl.program_id(0) % blocks * SIDE + tl.arange(0, SIDE), tl.arange(0, K)
    position = first + row
    valid = position < stop
    if first >= stop:
        return
    q += batch * q_stride_b + group * q_stride_h
    k += batch * k_stride_b + group * k_stride_h
    summed_q, summed_k = tl.zeros([SIDE, K], dtype=tl.float32), tl.zeros([SIDE, K], dtype=tl.float32)
    for member in range(heads_per_group):
        slot = (batch * num_tiles + index) * num_heads + group * heads_per_group + member
        at = (slot * Q + row)[:, None] * K + column[None, :]
        summed_q += tl.load(of_queries + at).to(tl.float32)
        summed_k += tl.load(of_keys + at).to(tl.float32)
    mask = valid[:, None] & (column < key_width)[None, :]
    place = (batch * num_positions + position) * tl.num_programs(1) + group
    out = place[:, None] * key_width + column[None, :]
    inverse = inverse_lengths(q, position, valid, q_stride_t, key_width, K=K)
    unit = unit_rows(q, position, valid, q_stride_t, column, key_width, inverse)
    found = (summed_q - unit * tl.sum(unit * summed_q, 1)[:, None]) * (inverse * scale)[:, None]
    tl.store(grad_q + out, narrow(found, grad_q.dtype.element_ty), mask=mask)
    inverse = inverse_lengths(k, position, valid, k_stride_t, key_width, K=K)
    unit = unit_rows(k, position, valid, k_stride_t, column, key_width, inverse)
    found = (summed_k - unit * tl.sum(unit * summed_k, 1)[:, None]) * inverse[:, None]
    tl.store(grad_k + out, narrow(found, grad_k.dtype.element_ty), mask=mask)
