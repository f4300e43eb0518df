"""The backward kernel that walks the gradient of the state over a sequence, from its end."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, widen
from megakernels.ops.mamba3.kernel_halves import back_turn, load_half, load_part, store_half, store_part, turned_rows
from megakernels.ops.mamba3.kernel_tiles import accumulate, decays_of, rows_of


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_state_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_outputs, grad_final, C, C_bias, starts, tables, cosines, sines, states, grad_states, ends, steps, grad_initial, num_positions,
    num_heads, heads_per_group, rank_count: tl.constexpr, head_width: tl.constexpr, state_width: tl.constexpr, num_angles: tl.constexpr,
    save_every, num_rows, num_segments, first_segment, count, tiles,
    B_stride_b, B_stride_t, B_stride_r, B_stride_g,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_MIMO: tl.constexpr, TURNS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Gradients of the states after every tile of `count` segments of one sequence and head, and of the state before them.

    `states` and `grad_states` are [B, count, tiles, H, P, 2 · S]; `grad_initial` may be `grad_final`. `ends` [B, segments, tiles, H, N] has
    the gradients of the angles at the start of each tile, but for what depends on the last angle alone; to the last part of `steps`
    [3, B, H, T] is added what log decays scale in the state that is carried on.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group = head // heads_per_group
    dtype: tl.constexpr = C.dtype.element_ty
    column = tl.arange(0, P)
    in_p, in_state = column < head_width, column * state_width
    size = head_width * state_width
    whole = (batch * num_heads + head) * size
    one, other = tl.zeros([P, S], dtype=tl.float32), tl.zeros([P, S], dtype=tl.float32)
    if HAS_FINAL:
        one = load_half(grad_final + whole + in_state, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=0)
        other = load_half(grad_final + whole + in_state, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=1)
    for back in tl.range(count, disable_licm=True):
        segment = count - 1 - back
        begin = (first_segment + segment) * save_every
        stop = tl.minimum(begin + save_every, num_positions)
        num_tiles = tl.cdiv(stop - begin, Q)
        for tile_back in tl.range(num_tiles, disable_licm=True):
            tile = num_tiles - 1 - tile_back
            tile_row = ((batch * count + segment) * tiles + tile) * num_heads + head
            at_state = grad_states + (tile_row * head_width + column) * (2 * S)
            store_part(at_state, one, in_p, S=S, HALF=0)
            store_part(at_state, other, in_p, S=S, HALF=1)
            at_before = states + (tile_row * head_width + column) * (2 * S)
            passed_on = tl.sum(one * widen(load_part(at_before, in_p, S=S, HALF=0)), 1)
            passed_on += tl.sum(other * widen(load_part(at_before, in_p, S=S, HALF=1)), 1)
            first = begin + tile * Q
            position, rank, valid = rows_of(first, stop, rank_count, M=M, R=R)
            angles, strides = (cosines, sines), (B_stride_b, B_stride_t, B_stride_r, B_stride_g)
            row_places = batch, head, group, position, rank, valid
            sizes = num_positions, num_heads, rank_count, state_width, num_angles
            last = tl.minimum(first + Q, stop) - 1
            _arrived, from_start, _to_end, across = decays_of(
                tables, starts, row_places, first, last, sizes, num_rows, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE
            )
            query_rows, more_query_rows = turned_rows(
                C, C_bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=not HAS_MIMO, TURNS=TURNS
            )
            queries = narrow(query_rows, dtype)
            more_queries = narrow(more_query_rows, dtype)
            at = grad_outputs + (tile_row * M + tl.arange(0, M))[:, None] * head_width + column[None, :]
            grad = tl.load(at, mask=valid[:, None] & in_p[None, :], other=0.0).to(tl.float32)
            read = tl.trans(narrow(grad * from_start[:, None], dtype))
            one = across * one + dot(read, queries)
            other = across * other + dot(read, more_queries)
            # The state that is carried on is what the log decays of all the tile's positions scale.
            written = first + tl.arange(0, Q)
            at_step = steps + 2 * num_rows + (batch * num_heads + head) * num_positions + written
            accumulate(at_step, tl.zeros([Q], dtype=tl.float32) + across * tl.sum(passed_on, 0), written < stop)
            # Turning all later queries and keys turns back what they read from the state before the tile.
            end_row = ((batch * num_segments + first_segment + segment) * tiles + tile) * num_heads + head
            at_end, pair = ends + end_row * num_angles + tl.arange(0, S // 2), tl.arange(0, S // 2)
            if TURNS > 0:
                tl.store(at_end, back_turn(one, at_before, in_p, S=S, HALF=0), mask=pair < num_angles)
            if TURNS > 1:
                tl.store(at_end + S // 2, back_turn(other, at_before, in_p, S=S, HALF=1), mask=S // 2 + pair < num_angles)
    store_half(grad_initial + whole + in_state, one, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=0)
    store_half(grad_initial + whole + in_state, other, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=1)
