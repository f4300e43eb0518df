"""The backward kernel of a tile's pairs of positions where a head has one decay."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, sigmoid
from megakernels.ops.gated_delta.kernel_tiles import (
    decay_of,
    documents_of,
    gates_of,
    head_rows,
    row_places,
    strengths_of,
    tile_place,
)


@triton.jit  # type: ignore[untyped-decorator]
def delta_pair_gradient_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one tile's formulas, in order
    q, k, decay, beta, A_log, dt_bias, starts, queries, keys, reads, scores, systems, unread, carries, grad_decay, grad_beta, shares,
    num_positions, num_heads, heads_per_group, key_width, save_every, first_segment, tiles, all_tiles,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, decay_stride_b, decay_stride_t, decay_stride_h,
    beta_stride_b, beta_stride_t, beta_stride_h,
    scale, beta_limit,
    Q: tl.constexpr, K: tl.constexpr, W: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """One tile and head: `queries` and `keys` become the gradients of the head's unit q / √K and unit k; those of decay and β are written.

    `shares` [B, tiles, H, 2] has sums over the tile for A_log and dt_bias.
    """
    tile = tile_place(first_segment, tiles, tl.num_programs(0), save_every, num_positions, num_heads, Q=Q, ROWS=Q)
    batch, head, index, slot, first, stop, row, position, valid = tile
    if first >= stop:
        return
    dtype: tl.constexpr = queries.dtype.element_ty
    q_strides, k_strides = (q_stride_b, q_stride_t, q_stride_h), (k_stride_b, k_stride_t, k_stride_h)
    q, k, q_inverse, k_inverse = head_rows(q, k, tile, heads_per_group, q_strides, k_strides, key_width, scale, K=K)
    seen, end = documents_of(starts, batch, num_positions, first, stop, position, valid, Q=Q, HAS_STARTS=HAS_STARTS)
    at_decay = decay + batch * decay_stride_b + head * decay_stride_h
    raw, log_decay, from_start, to_end, _across, sums, rests = gates_of(
        at_decay, A_log, dt_bias, seen, end, first, position, valid, head, decay_stride_t, HAS_STARTS=HAS_STARTS
    )
    strength = strengths_of(beta + batch * beta_stride_b + head * beta_stride_h, position, valid, beta_stride_t, beta_limit)
    found, products = tl.zeros([Q, Q], dtype=tl.float32), tl.zeros([Q, Q], dtype=tl.float32)
    for begin in range(0, K, W):
        column = begin + tl.arange(0, W)
        inside = valid[:, None] & (column < key_width)[None, :]
        of_k = tl.load(row_places(k, position, k_stride_t, column), mask=inside, other=0.0)
        found += dot(tl.load(row_places(q, position, q_stride_t, column), mask=inside, other=0.0), tl.trans(of_k))
        products += dot(of_k, tl.trans(of_k))
    at_pairs = (slot * Q + row)[:, None] * Q + row[None, :]
    below = row[:, None] > row[None, :]
    pair = tl.where(below, decay_of(sums, rests, position, seen, valid), 0.0)
    of_scores = tl.load(scores + at_pairs).to(tl.float32) * pair
    of_systems = tl.load(systems + at_pairs).to(tl.float32) * pair
    of_products = of_systems * strength[:, None]
    pairs = (of_scores * found * q_inverse[:, None] + of_products * products * k_inverse[:, None]) * k_inverse[None, :]
    # Pairs that span a position: sums over rows from the position on, minus sums over columns from the position on.
    balance = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    own_score = tl.load(scores + (slot * Q + row) * Q + row).to(tl.float32)[:, None]
    until, of_strength = tl.zeros([Q], dtype=tl.float32), tl.load(unread + slot * Q + row).to(tl.float32)
    kept = 0.0
    for begin in range(0, K, W):
        column = begin + tl.arange(0, W)
        out = (slot * Q + row)[:, None] * K + column[None, :]
        inside = valid[:, None] & (column < key_width)[None, :]
        of_q = tl.load(row_places(q, position, q_stride_t, column), mask=inside, other=0.0)
        of_k = tl.load(row_places(k, position, k_stride_t, column), mask=inside, other=0.0)
        own_q, own_k = of_q.to(tl.float32) * q_inverse[:, None], of_k.to(tl.float32) * k_inverse[:, None]
        asked = tl.load(queries + out).to(tl.float32) * from_start[:, None]
        read = tl.load(reads + out).to(tl.float32) * from_start[:, None]
        ended = tl.load(keys + out).to(tl.float32) * to_end[:, None]
        as_row = dot(narrow(of_systems * k_inverse[None, :], dtype), of_k)
        of_strength += tl.sum(own_k * (as_row - read), 1)
        balance += tl.sum(own_q * asked - own_k * read * strength[:, None], 1)
        until += tl.sum(own_k * ended, 1)
        as_column = dot(tl.trans(narrow(of_scores * q_inverse[:, None], dtype)), of_q)
        as_column += dot(tl.trans(narrow(of_products * k_inverse[:, None], dtype)), of_k)
        grad_q = asked + dot(narrow(of_scores * k_inverse[None, :], dtype), of_k) + own_score * own_k
        grad_k = strength[:, None] * (as_row - read) + ended + as_column + own_score * own_q
        tl.debug_barrier()
        tl.store(queries + out, narrow(grad_q, dtype))
        tl.store(keys + out, narrow(grad_k, dtype))
        kept += tl.sum(tl.load(carries + slot * K + column).to(tl.float32), 0)
    of_log = tl.cumsum(balance, 0, reverse=True) + (tl.cumsum(until, 0) - until) + kept
    of_log = tl.where(valid, of_log, 0.0)
    of_raw = of_log * -tl.exp(tl.load(A_log + head).to(tl.float32)) * sigmoid(raw)
    place = (batch * num_positions + position) * num_heads + head
    tl.store(grad_decay + place, narrow(of_raw, grad_decay.dtype.element_ty), mask=valid)
    of_beta = of_strength * strength * (1.0 - strength / beta_limit)
    tl.store(grad_beta + place, narrow(of_beta, grad_beta.dtype.element_ty), mask=valid)
    share = shares + ((batch * all_tiles + first_segment * tiles + index) * num_heads + head) * 2
    tl.store(share, tl.sum(of_log * log_decay, 0))
    tl.store(share + 1, tl.sum(tl.where(valid, of_raw, 0.0), 0))
