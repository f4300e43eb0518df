"""Kernels that make a tile's decayed rows, scores and triangular system."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, softplus
from megakernels.ops.gated_delta.kernel_tiles import (
    EPS,
    SIDE,
    decay_of,
    documents_of,
    fall_of,
    gates_of,
    head_rows,
    inverse_lengths,
    row_places,
    strengths_of,
    tile_place,
    unit_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def delta_scores_kernel(  # type: ignore[no-untyped-def]
    q, k, decay, beta, A_log, dt_bias, starts, queries, keys, reads, scores, systems, strengths, carries, num_positions, num_heads,
    heads_per_group, key_width, save_every, first_segment, tiles,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, decay_stride_b, decay_stride_t, decay_stride_h,
    beta_stride_b, beta_stride_t, beta_stride_h,
    scale, beta_limit,
    Q: tl.constexpr, K: tl.constexpr, W: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """One decay a head: a tile's rows and scores.

    Writes q decayed from the tile's start (`queries`), k decayed to its end (`keys`), β k decayed from its start (`reads`), q kᵀ decayed
    (`scores`), β k kᵀ decayed below the diagonal (`systems`), β (`strengths`) and the decay across the tile (`carries`).
    """
    tile = tile_place(first_segment, tiles, tl.num_programs(0), save_every, num_positions, num_heads, Q=Q, ROWS=Q)
    batch, head, _index, slot, first, stop, row, position, valid = tile
    if first >= stop:
        return
    dtype: tl.constexpr = queries.dtype.element_ty
    q_strides, k_strides = (q_stride_b, q_stride_t, q_stride_h), (k_stride_b, k_stride_t, k_stride_h)
    q, k, q_inverse, k_inverse = head_rows(q, k, tile, heads_per_group, q_strides, k_strides, key_width, scale, K=K)
    seen, end = documents_of(starts, batch, num_positions, first, stop, position, valid, Q=Q, HAS_STARTS=HAS_STARTS)
    at_decay = decay + batch * decay_stride_b + head * decay_stride_h
    _raw, _log, from_start, to_end, across, sums, rests = gates_of(
        at_decay, A_log, dt_bias, seen, end, first, position, valid, head, decay_stride_t, HAS_STARTS=HAS_STARTS
    )
    strength = strengths_of(beta + batch * beta_stride_b + head * beta_stride_h, position, valid, beta_stride_t, beta_limit)
    found, products = tl.zeros([Q, Q], dtype=tl.float32), tl.zeros([Q, Q], dtype=tl.float32)
    for begin in range(0, K, W):
        column = begin + tl.arange(0, W)
        inside = valid[:, None] & (column < key_width)[None, :]
        of_q = tl.load(row_places(q, position, q_stride_t, column), mask=inside, other=0.0)
        of_k = tl.load(row_places(k, position, k_stride_t, column), mask=inside, other=0.0)
        found += dot(of_q, tl.trans(of_k))  # queries and keys as given: unit rows would be rounded
        products += dot(of_k, tl.trans(of_k))
        own_q, own_k = of_q.to(tl.float32) * q_inverse[:, None], of_k.to(tl.float32) * k_inverse[:, None]
        out = (slot * Q + row)[:, None] * K + column[None, :]
        tl.store(queries + out, narrow(own_q * from_start[:, None], dtype))
        tl.store(keys + out, narrow(own_k * to_end[:, None], dtype))
        tl.store(reads + out, narrow(own_k * (from_start * strength)[:, None], dtype))
        tl.store(carries + slot * K + column, tl.zeros([W], dtype=tl.float32) + across)
    pair = decay_of(sums, rests, position, seen, valid) * k_inverse[None, :]
    out = (slot * Q + row)[:, None] * Q + row[None, :]
    tl.store(scores + out, narrow(found * pair * q_inverse[:, None], dtype))
    tl.store(systems + out, tl.where(row[:, None] > row[None, :], products * pair * (k_inverse * strength)[:, None], 0.0))
    tl.store(strengths + slot * Q + row, strength)


@triton.jit  # type: ignore[untyped-decorator]
def delta_row_decay_kernel(  # type: ignore[no-untyped-def]
    q, k, decay, beta, A_log, dt_bias, starts, queries, keys, reads, sums, strengths, carries, num_positions, num_heads, heads_per_group,
    key_width, save_every, first_segment, tiles, plane,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, decay_stride_b, decay_stride_t, decay_stride_h,
    beta_stride_b, beta_stride_t, beta_stride_h,
    scale, beta_limit,
    Q: tl.constexpr, K: tl.constexpr, W: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One decay a row of the state: as `delta_scores_kernel` except for scores and systems; `sums` has running sums of log decays.

    With `PRECISE` a second plane of `sums` has their rests.
    """
    tile = tile_place(first_segment, tiles, tl.num_programs(0), save_every, num_positions, num_heads, Q=Q, ROWS=Q)
    batch, head, _index, slot, first, stop, row, position, valid = tile
    if first >= stop:
        return
    dtype: tl.constexpr = queries.dtype.element_ty
    q_strides, k_strides = (q_stride_b, q_stride_t, q_stride_h), (k_stride_b, k_stride_t, k_stride_h)
    q, k, q_inverse, k_inverse = head_rows(q, k, tile, heads_per_group, q_strides, k_strides, key_width, scale, K=K)
    decay += batch * decay_stride_b + head * decay_stride_h
    seen, end = documents_of(starts, batch, num_positions, first, stop, position, valid, Q=Q, HAS_STARTS=HAS_STARTS)
    strength = strengths_of(beta + batch * beta_stride_b + head * beta_stride_h, position, valid, beta_stride_t, beta_limit)
    tl.store(strengths + slot * Q + row, strength)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    for begin in range(0, K, W):
        column = begin + tl.arange(0, W)
        inside = valid[:, None] & (column < key_width)[None, :]
        raw = tl.load(row_places(decay, position, decay_stride_t, column), mask=inside, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias + head * key_width + column, mask=column < key_width, other=0.0).to(tl.float32)[None, :]
        log_decay = tl.where(inside, rate * softplus(raw), 0.0)
        out = (slot * Q + row)[:, None] * K + column[None, :]
        if PRECISE:
            wide = tl.cumsum(log_decay.to(tl.float64), 0)
            fall = (tl.min(wide, 0)[None, :] - wide).to(tl.float32)
            found = wide.to(tl.float32)
            tl.store(sums + plane + out, (wide - found.to(tl.float64)).to(tl.float32))
        else:
            found = tl.cumsum(log_decay, 0)
            fall = tl.min(found, 0)[None, :] - found
        tl.store(sums + out, found)
        from_start, to_end, across = tl.exp(found), tl.exp(fall), tl.exp(tl.min(found, 0))
        if HAS_STARTS:
            from_start = tl.where((seen < first)[:, None], from_start, 0.0)
            to_end = tl.where((position >= end)[:, None], to_end, 0.0)
            across = tl.where(end < first, across, 0.0)
        own_q = unit_rows(q, position, valid, q_stride_t, column, key_width, q_inverse)
        own_k = unit_rows(k, position, valid, k_stride_t, column, key_width, k_inverse)
        tl.store(queries + out, narrow(own_q * from_start, dtype))
        tl.store(keys + out, narrow(own_k * to_end, dtype))
        tl.store(reads + out, narrow(own_k * from_start * strength[:, None], dtype))
        tl.store(carries + slot * K + column, across)


@triton.jit  # type: ignore[untyped-decorator]
def delta_row_scores_kernel(  # type: ignore[no-untyped-def]
    q, k, starts, sums, strengths, scores, systems, num_positions, num_heads, heads_per_group, key_width, save_every, first_segment, tiles,
    num_tiles, plane,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    scale,
    Q: tl.constexpr, K: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One decay a row of the state: scores and systems of 16 rows of a tile.

    Pairs with an earlier block of 16 are products of rows decayed to that block's end and of keys decayed to it: neither factor is above 1.
    Pairs inside the block are sums over columns, key by key.
    """
    blocks: tl.constexpr = Q // SIDE
    block = tl.program_id(0) % blocks
    tile = tile_place(first_segment, tiles, num_tiles, save_every, num_positions, num_heads, Q=Q, ROWS=SIDE)
    batch, _head, _index, slot, first, stop, row, position, valid = tile
    if first >= stop:
        return
    side, column = tl.arange(0, SIDE), tl.arange(0, K)
    dtype: tl.constexpr = scores.dtype.element_ty
    q_strides, k_strides = (q_stride_b, q_stride_t, q_stride_h), (k_stride_b, k_stride_t, k_stride_h)
    q, k, q_inverse, k_inverse = head_rows(q, k, tile, heads_per_group, q_strides, k_strides, key_width, scale, K=K)
    sums += slot * Q * K
    seen = tl.zeros_like(position)
    if HAS_STARTS:
        seen = tl.load(starts + batch * num_positions + position, mask=valid, other=0)
    strength = tl.load(strengths + slot * Q + row).to(tl.float32)
    own_q = unit_rows(q, position, valid, q_stride_t, column, key_width, q_inverse)
    own_k = unit_rows(k, position, valid, k_stride_t, column, key_width, k_inverse)
    for other in range(blocks):
        there = other * SIDE + side
        at = first + there
        visible = valid[:, None] & (row[:, None] >= there[None, :]) & (at[None, :] >= seen[:, None])
        found, products = tl.zeros([SIDE, SIDE], dtype=tl.float32), tl.zeros([SIDE, SIDE], dtype=tl.float32)
        if other < block:
            end = other * SIDE + SIDE - 1
            exists = at < stop
            inverse = inverse_lengths(k, at, exists, k_stride_t, key_width, K=K)
            fall = fall_of(sums, end, there[:, None], column[None, :], plane, K=K, PRECISE=PRECISE)
            other_k = narrow(unit_rows(k, at, exists, k_stride_t, column, key_width, inverse) * tl.exp(fall), dtype)
            onward = tl.exp(fall_of(sums, row[:, None], end, column[None, :], plane, K=K, PRECISE=PRECISE))
            found = dot(narrow(own_q * onward, dtype), tl.trans(other_k))
            products = dot(narrow(own_k * onward, dtype), tl.trans(other_k))
        if other == block:
            for each in range(SIDE):
                key, place = block * SIDE + each, first + block * SIDE + each
                in_key = tl.where(column < key_width, place < stop, False)
                key_row = tl.load(k + place.to(tl.int64) * k_stride_t + column, mask=in_key, other=0.0).to(tl.float32)
                fall = fall_of(sums, row[:, None], key, column[None, :], plane, K=K, PRECISE=PRECISE)
                key_row *= tl.rsqrt(tl.sum(key_row * key_row, 0) + EPS)
                key_rows = tl.exp(tl.where((row >= key)[:, None], fall, float("-inf"))) * key_row[None, :]
                found = tl.where((side == each)[None, :], tl.sum(own_q * key_rows, 1)[:, None], found)
                products = tl.where((side == each)[None, :], tl.sum(own_k * key_rows, 1)[:, None], products)
        out = (slot * Q + row)[:, None] * Q + there[None, :]
        tl.store(scores + out, narrow(tl.where(visible, found, 0.0), dtype))
        below = visible & (row[:, None] > there[None, :])
        tl.store(systems + out, tl.where(below, products * strength[:, None], 0.0))
