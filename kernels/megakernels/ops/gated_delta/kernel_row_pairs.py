"""The backward kernel of a tile's pairs of positions where each row of the state has a decay."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.gated_delta.kernel_tiles import (
    EPS,
    SIDE,
    documents_of,
    fall_of,
    head_rows,
    inverse_lengths,
    tile_place,
    unit_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def pair_gradients(scores, systems, slot, row, there, first, seen, valid, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradients of scores and systems of pairs row > there of one document, else 0."""
    at = (slot * Q + row)[:, None] * Q + there[None, :]
    visible = valid[:, None] & (row[:, None] > there[None, :]) & ((first + there)[None, :] >= seen[:, None])
    of_scores = tl.where(visible, tl.load(scores + at).to(tl.float32), 0.0)
    return of_scores, tl.where(visible, tl.load(systems + at).to(tl.float32), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def delta_row_pair_gradient_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one block's formulas, in order
    q, k, starts, sums, strengths, queries, keys, reads, scores, systems, unread, falls, grad_beta, num_positions, num_heads,
    heads_per_group, key_width, save_every, first_segment, tiles, num_tiles, plane,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
    scale, beta_limit,
    Q: tl.constexpr, K: tl.constexpr, HAS_STARTS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """16 rows of a tile and head: `queries` and `reads` become the gradients of the head's unit q / √K and unit k.

    `falls` and `keys` have what the log decays of earlier and of later positions scale, and the gradient of β is written. In `falls` pairs
    of later positions cancel, so row and column of a pair multiply the same rounded factors. With `PRECISE` a second plane of it has sums
    over the pairs of the block across each position instead: a difference would keep the rounding of the larger sum.
    """
    blocks: tl.constexpr = Q // SIDE
    block = tl.program_id(0) % blocks
    tile = tile_place(first_segment, tiles, num_tiles, save_every, num_positions, num_heads, Q=Q, ROWS=SIDE)
    batch, head, _index, slot, first, stop, row, position, valid = tile
    if first >= stop:
        return
    side, column = tl.arange(0, SIDE), tl.arange(0, K)
    dtype: tl.constexpr = queries.dtype.element_ty
    q_strides, k_strides = (q_stride_b, q_stride_t, q_stride_h), (k_stride_b, k_stride_t, k_stride_h)
    q, k, q_inverse, k_inverse = head_rows(q, k, tile, heads_per_group, q_strides, k_strides, key_width, scale, K=K)
    sums += slot * Q * K
    seen, end = documents_of(starts, batch, num_positions, first, stop, position, valid, Q=Q, HAS_STARTS=HAS_STARTS)
    strength = tl.load(strengths + slot * Q + row).to(tl.float32)[:, None]
    own_q = unit_rows(q, position, valid, q_stride_t, column, key_width, q_inverse)
    own_k = unit_rows(k, position, valid, k_stride_t, column, key_width, k_inverse)
    grad_q, grad_k = tl.zeros([SIDE, K], dtype=tl.float32), tl.zeros([SIDE, K], dtype=tl.float32)
    across = tl.zeros([SIDE, K], dtype=tl.float32)
    balance, of_strength = tl.zeros([SIDE, K], dtype=tl.float32), tl.load(unread + slot * Q + row).to(tl.float32)
    for other in range(blocks):
        there = other * SIDE + side
        at = first + there
        exists = at < stop
        if other < block:
            edge = other * SIDE + SIDE - 1
            of_scores, of_systems = pair_gradients(scores, systems, slot, row, there, first, seen, valid, Q=Q)
            inverse = inverse_lengths(k, at, exists, k_stride_t, key_width, K=K)
            fall = tl.exp(fall_of(sums, edge, there[:, None], column[None, :], plane, K=K, PRECISE=PRECISE))
            other_k = narrow(unit_rows(k, at, exists, k_stride_t, column, key_width, inverse) * fall, dtype)
            onward = tl.exp(fall_of(sums, row[:, None], edge, column[None, :], plane, K=K, PRECISE=PRECISE))
            asked = dot(narrow(of_scores, dtype), other_k)
            as_row = dot(narrow(of_systems * strength, dtype), other_k)
            rounded_q = narrow(own_q * onward, dtype)
            rounded_k = narrow(own_k * onward, dtype)
            of_strength += tl.sum(rounded_k.to(tl.float32) * dot(narrow(of_systems, dtype), other_k), 1)
            balance += rounded_q.to(tl.float32) * asked + rounded_k.to(tl.float32) * as_row
            grad_q += asked * onward
            grad_k += as_row * onward
        if other > block:
            edge = block * SIDE + SIDE - 1
            other_seen = tl.zeros_like(at)
            if HAS_STARTS:
                other_seen = tl.load(starts + batch * num_positions + at, mask=exists, other=0)
            of_scores, of_systems = pair_gradients(scores, systems, slot, there, row, first, other_seen, exists, Q=Q)
            of_systems *= tl.load(strengths + slot * Q + there).to(tl.float32)[:, None]
            onward = tl.exp(fall_of(sums, there[:, None], edge, column[None, :], plane, K=K, PRECISE=PRECISE))
            inverse = inverse_lengths(q, at, exists, q_stride_t, key_width, K=K) * scale
            rounded_q = narrow(unit_rows(q, at, exists, q_stride_t, column, key_width, inverse) * onward, dtype)
            inverse = inverse_lengths(k, at, exists, k_stride_t, key_width, K=K)
            rounded_k = narrow(unit_rows(k, at, exists, k_stride_t, column, key_width, inverse) * onward, dtype)
            as_column = dot(tl.trans(narrow(of_scores, dtype)), rounded_q) + dot(tl.trans(narrow(of_systems, dtype)), rounded_k)
            fall = tl.exp(fall_of(sums, edge, row[:, None], column[None, :], plane, K=K, PRECISE=PRECISE))
            kept = narrow(own_k * fall, dtype)
            balance -= kept.to(tl.float32) * as_column
            grad_k += as_column * fall
    for each in range(SIDE):
        key, place = block * SIDE + each, first + block * SIDE + each
        in_key = tl.where(column < key_width, place < stop, False)
        key_row = tl.load(k + place.to(tl.int64) * k_stride_t + column, mask=in_key, other=0.0).to(tl.float32)
        key_row *= tl.rsqrt(tl.sum(key_row * key_row, 0) + EPS)
        visible = valid & (row > key) & (place >= seen)
        of_scores = tl.where(visible, tl.load(scores + (slot * Q + row) * Q + key).to(tl.float32), 0.0)[:, None]
        of_systems = tl.where(visible, tl.load(systems + (slot * Q + row) * Q + key).to(tl.float32), 0.0)[:, None]
        fall = fall_of(sums, row[:, None], key, column[None, :], plane, K=K, PRECISE=PRECISE)
        fall = tl.exp(tl.where((row > key)[:, None], fall, float("-inf")))
        asked, as_row = of_scores * fall * key_row[None, :], of_systems * fall * key_row[None, :]
        as_column = tl.sum((of_scores * own_q + of_systems * strength * own_k) * fall, 0)
        of_strength += tl.sum(own_k * as_row, 1)
        of_key = tl.where((side == each)[:, None], as_column[None, :], 0.0)
        terms = own_q * asked + own_k * as_row * strength
        if PRECISE:
            across += tl.where((row > key)[:, None], tl.cumsum(terms, 0, reverse=True), 0.0)
        else:
            balance += terms - of_key * key_row[None, :]
        grad_q += asked
        grad_k += as_row * strength + of_key
    out = (slot * Q + row)[:, None] * K + column[None, :]
    from_start = tl.load(sums + row[:, None] * K + column[None, :]).to(tl.float32)
    from_start = tl.where(valid[:, None], tl.exp(from_start), 0.0)
    to_end = tl.exp(fall_of(sums, Q - 1, row[:, None], column[None, :], plane, K=K, PRECISE=PRECISE))
    if HAS_STARTS:
        from_start = tl.where((seen < first)[:, None], from_start, 0.0)
        to_end = tl.where((position >= end)[:, None], to_end, 0.0)
    asked = tl.load(queries + out).to(tl.float32) * from_start
    read = tl.load(reads + out).to(tl.float32) * from_start
    ended = tl.load(keys + out).to(tl.float32) * to_end
    own_score = tl.where(valid, tl.load(scores + (slot * Q + row) * Q + row).to(tl.float32), 0.0)[:, None]
    of_strength -= tl.sum(own_k * read, 1)
    tl.debug_barrier()
    tl.store(queries + out, narrow(grad_q + asked + own_score * own_k, dtype))
    tl.store(reads + out, narrow(grad_k - read * strength + ended + own_score * own_q, dtype))
    tl.store(falls + out, balance + own_q * asked - own_k * read * strength)
    if PRECISE:
        tl.store(falls + plane + out, across)
    tl.store(keys + out, narrow(own_k * ended, dtype))
    own = tl.load(strengths + slot * Q + row).to(tl.float32)
    of_beta = of_strength * own * (1.0 - own / beta_limit)
    place = (batch * num_positions + position) * num_heads + head
    tl.store(grad_beta + place, narrow(of_beta, grad_beta.dtype.element_ty), mask=valid)
