"""Backward kernels over the columns of a tile's states and values.

With G the transposed inverse of a tile's system times the gradient of X (`solved`): the gradients of v, of systems and of scores; then the
gradients of a tile's keys and queries through its states.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.gated_delta.kernel_tiles import row_places, tile_of, tile_place


@triton.jit  # type: ignore[untyped-decorator]
def delta_value_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_y, v, strengths, written, solved, systems, scores, unread, grad_v, num_positions, num_heads, value_width, save_every,
    first_segment, tiles,
    grad_stride_b, grad_stride_t, grad_stride_h, v_stride_b, v_stride_t, v_stride_h,
    Q: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One tile and head: the gradients of v, of systems and scores before their decays, and Σ G v of each row (`unread`)."""
    tile = tile_place(first_segment, tiles, tl.num_programs(0), save_every, num_positions, num_heads, Q=Q, ROWS=Q)
    batch, head, _index, slot, first, stop, row, position, valid = tile
    if first >= stop:
        return
    dtype: tl.constexpr = scores.dtype.element_ty
    grad_y += batch * grad_stride_b + head * grad_stride_h
    v += batch * v_stride_b + head * v_stride_h
    strength = tl.load(strengths + slot * Q + row).to(tl.float32)
    at_pairs = (slot * Q + row)[:, None] * Q + row[None, :]
    of_strength = tl.zeros([Q], dtype=tl.float32)
    of_system, of_scores = tl.zeros([Q, Q], dtype=tl.float32), tl.zeros([Q, Q], dtype=tl.float32)
    for begin in range(0, V, W):
        column = begin + tl.arange(0, W)
        mask = valid[:, None] & (column < value_width)[None, :]
        at = (slot * Q + row)[:, None] * V + column[None, :]
        gradient = tl.load(solved + at)
        values = tl.load(written + at)
        found = gradient.to(tl.float32)
        own = tl.load(row_places(v, position, v_stride_t, column), mask=mask, other=0.0).to(tl.float32)
        of_strength += tl.sum(found * own, 1)
        out = ((batch * num_positions + position) * num_heads + head)[:, None] * value_width + column[None, :]
        tl.store(grad_v + out, narrow(found * strength[:, None], grad_v.dtype.element_ty), mask=mask)
        of_system -= dot(gradient, tl.trans(values))
        grad = tl.load(row_places(grad_y, position, grad_stride_t, column), mask=mask, other=0.0)
        of_scores += dot(grad, tl.trans(values))
    tl.store(systems + at_pairs, tl.where(row[:, None] > row[None, :], of_system, 0.0))
    tl.store(scores + at_pairs, narrow(tl.where(row[:, None] >= row[None, :], of_scores, 0.0), dtype))
    tl.store(unread + slot * Q + row, of_strength)


@triton.jit  # type: ignore[untyped-decorator]
def delta_key_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_y, between, grad_between, written, solved, queries, keys, reads, carries, num_positions, num_heads, value_width, save_every,
    first_segment, tiles, num_tiles,
    grad_stride_b, grad_stride_t, grad_stride_h,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """One tile and head, L rows of its states.

    `queries` and `keys` become their gradients, `reads` G Sᵀ, and `carries` the gradient of the logarithm of each row's decay.
    """
    blocks: tl.constexpr = K // L
    index, head, batch = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, stop = tile_of(index, first_segment, tiles, save_every, num_positions, Q=Q)
    if first >= stop:
        return
    row, line = tl.arange(0, Q), tl.program_id(0) % blocks * L + tl.arange(0, L)
    position = first + row
    valid = position < stop
    slot = (batch * num_tiles + index) * num_heads + head
    dtype: tl.constexpr = queries.dtype.element_ty
    grad_y += batch * grad_stride_b + head * grad_stride_h
    of_reads, of_queries = tl.zeros([Q, L], dtype=tl.float32), tl.zeros([Q, L], dtype=tl.float32)
    of_keys, kept = tl.zeros([Q, L], dtype=tl.float32), tl.zeros([L], dtype=tl.float32)
    for begin in range(0, V, W):
        column = begin + tl.arange(0, W)
        mask = valid[:, None] & (column < value_width)[None, :]
        at, at_state = (slot * Q + row)[:, None] * V + column[None, :], (slot * K + line)[:, None] * V + column[None, :]
        state = tl.load(between + at_state)
        grad_state = tl.load(grad_between + at_state)
        of_reads += dot(tl.load(solved + at), tl.trans(state))
        grad = tl.load(row_places(grad_y, position, grad_stride_t, column), mask=mask, other=0.0)
        of_queries += dot(grad, tl.trans(state))
        of_keys += dot(tl.load(written + at), tl.trans(grad_state))
        kept += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
    out = (slot * Q + row)[:, None] * K + line[None, :]
    tl.store(reads + out, narrow(of_reads, dtype))
    tl.store(queries + out, narrow(of_queries, dtype))
    tl.store(keys + out, narrow(of_keys, dtype))
    kept *= tl.load(carries + slot * K + line).to(tl.float32)
    tl.debug_barrier()
    tl.store(carries + slot * K + line, kept)
