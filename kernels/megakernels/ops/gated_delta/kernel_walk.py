"""Kernels that walk a head's state, and its gradient, over the tiles of a sequence.

With S the state before a tile, r, q and k the tile's decayed rows, T the inverse of its system, A its scores and a its decay:
X = T (β v − β r S), y = q S + A X, S' = a ⊙ S + kᵀ X.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.gated_delta.kernel_tiles import row_places


@triton.jit  # type: ignore[untyped-decorator]
def delta_walk_kernel(  # type: ignore[no-untyped-def]
    v, queries, keys, reads, scores, inverses, strengths, carries, initial, states, between, written, y, last, num_positions, num_heads,
    key_width, value_width, save_every, num_segments, first_segment, count, tiles,
    v_stride_b, v_stride_t, v_stride_h,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, HAS_INITIAL: tl.constexpr, WALKS: tl.constexpr,
):  # fmt: skip
    """W columns of one head's state.

    With `WALKS` over `count` segments from `initial`: writes the state before each segment, y and the last state, which may be `initial`.
    Without, over one segment from its saved state: writes the state before each tile (`between`) and X (`written`).
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_blocks: tl.constexpr = V // W
    own_segment, column = tl.program_id(2) // num_blocks, tl.program_id(2) % num_blocks * W + tl.arange(0, W)
    row, line = tl.arange(0, Q), tl.arange(0, K)
    dtype: tl.constexpr = queries.dtype.element_ty
    in_state = (line < key_width)[:, None] & (column < value_width)[None, :]
    within = line[:, None] * value_width + column[None, :]
    size = key_width * value_width
    whole = (batch * num_heads + head) * size + within
    v += batch * v_stride_b + head * v_stride_h
    state = tl.zeros([K, W], dtype=tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial + whole, mask=in_state, other=0.0).to(tl.float32)
    for each in range(count if WALKS else 1):
        segment = each if WALKS else own_segment
        place = ((batch * num_segments + first_segment + segment) * num_heads + head) * size + within
        if WALKS:
            tl.store(states + place, state, mask=in_state)
        else:
            state = tl.load(states + place, mask=in_state, other=0.0).to(tl.float32)
        begin = (first_segment + segment) * save_every
        stop = tl.minimum(begin + save_every, num_positions)
        for tile in range(tl.cdiv(stop - begin, Q)):
            slot = ((batch * count + segment) * tiles + tile) * num_heads + head
            of_keys = (slot * Q + row)[:, None] * K + line[None, :]
            at_pairs = (slot * Q + row)[:, None] * Q + row[None, :]
            position = begin + tile * Q + row
            mask = (position < stop)[:, None] & (column < value_width)[None, :]
            before = narrow(state, dtype)
            if not WALKS:
                tl.store(between + (slot * K + line)[:, None] * V + column[None, :], before)
            own = tl.load(row_places(v, position, v_stride_t, column), mask=mask, other=0.0).to(tl.float32)
            own *= tl.load(strengths + slot * Q + row).to(tl.float32)[:, None]
            missing = narrow(own - dot(tl.load(reads + of_keys), before), dtype)
            found = narrow(dot(tl.load(inverses + at_pairs), missing), dtype)
            if WALKS:
                made = dot(tl.load(queries + of_keys), before) + dot(tl.load(scores + at_pairs), found)
                out = ((batch * num_positions + position) * num_heads + head)[:, None] * value_width + column[None, :]
                tl.store(y + out, narrow(made, y.dtype.element_ty), mask=mask)
            else:
                tl.store(written + (slot * Q + row)[:, None] * V + column[None, :], found)
            carry = tl.load(carries + slot * K + line).to(tl.float32)
            state = carry[:, None] * state + dot(tl.trans(tl.load(keys + of_keys)), found)
    if WALKS:
        tl.store(last + whole, state, mask=in_state)


@triton.jit  # type: ignore[untyped-decorator]
def delta_walk_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_y, queries, keys, reads, scores, inverses, carries, grad_final, grad_between, solved, grad_initial, num_positions, num_heads,
    key_width, value_width, save_every, first_segment, count, tiles,
    grad_stride_b, grad_stride_t, grad_stride_h,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, HAS_FINAL: tl.constexpr,
):  # fmt: skip
    """W columns of the gradient of one head's state over `count` segments, from their end.

    Writes the gradient of the state after each tile, Tᵀ times that of X (`solved`), and the gradient of the state before the segments: it
    may be `grad_final`.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * W + tl.arange(0, W)
    row, line = tl.arange(0, Q), tl.arange(0, K)
    dtype: tl.constexpr = queries.dtype.element_ty
    in_state = (line < key_width)[:, None] & (column < value_width)[None, :]
    whole = ((batch * num_heads + head) * key_width + line)[:, None] * value_width + column[None, :]
    grad_y += batch * grad_stride_b + head * grad_stride_h
    state = tl.zeros([K, W], dtype=tl.float32)
    if HAS_FINAL:
        state = tl.load(grad_final + whole, mask=in_state, other=0.0).to(tl.float32)
    for back in range(count):
        segment = count - 1 - back
        begin = (first_segment + segment) * save_every
        stop = tl.minimum(begin + save_every, num_positions)
        num_tiles = tl.cdiv(stop - begin, Q)
        for tile_back in range(num_tiles):
            tile = num_tiles - 1 - tile_back
            slot = ((batch * count + segment) * tiles + tile) * num_heads + head
            of_keys = (slot * Q + row)[:, None] * K + line[None, :]
            after = narrow(state, dtype)
            tl.store(grad_between + (slot * K + line)[:, None] * V + column[None, :], after)
            position = begin + tile * Q + row
            mask = (position < stop)[:, None] & (column < value_width)[None, :]
            grad = tl.load(row_places(grad_y, position, grad_stride_t, column), mask=mask, other=0.0)
            at_pairs = (slot * Q + row)[:, None] * Q + row[None, :]
            reached = dot(tl.trans(tl.load(scores + at_pairs)), grad) + dot(tl.load(keys + of_keys), after)
            found = narrow(dot(tl.trans(tl.load(inverses + at_pairs)), narrow(reached, dtype)), dtype)
            tl.store(solved + (slot * Q + row)[:, None] * V + column[None, :], found)
            carry = tl.load(carries + slot * K + line).to(tl.float32)
            state = carry[:, None] * state + dot(tl.trans(tl.load(queries + of_keys)), grad)
            state -= dot(tl.trans(tl.load(reads + of_keys)), found)
    tl.store(grad_initial + whole, state, mask=in_state)
