"""The scan's kernel of states, which the backward runs again from the saved ones."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, prefetch_rows
from megakernels.ops.mamba3.kernel_halves import load_half, prefetch_steps, store_half, store_part, turned_half
from megakernels.ops.mamba3.kernel_tiles import decays_of, rows_of, value_rows


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_state_kernel(  # type: ignore[no-untyped-def]
    x, B, B_bias, mimo_x, starts, tables, cosines, sines, first_states, saved, states, last_states, num_positions, num_heads,
    heads_per_group, rank_count: tl.constexpr, head_width: tl.constexpr, state_width: tl.constexpr, num_angles: tl.constexpr, save_every,
    num_rows, num_segments, first_segment, count, tiles,
    x_stride_b, x_stride_t, x_stride_h, B_stride_b, B_stride_t, B_stride_r, B_stride_g,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_MIMO: tl.constexpr, TURNS: tl.constexpr, PRECISE: tl.constexpr, WALKS: tl.constexpr,
):  # fmt: skip
    """The state before each tile of `count` segments of one sequence and head: `states` [B, count, tiles, H, P, 2 · S].

    With `WALKS` of all these segments, from the state before them; those before each segment and after the last are stored too. Without, of
    one of them, from its saved state. `last_states` may be `first_states`. A program has one half of the columns: the halves are
    independent, and twice the programs with half the registers each wait for their loads concurrently.
    """
    places, read = (first_states, saved, states, last_states), (x, B, B_bias, mimo_x, starts, tables, cosines, sines)
    sizes = num_positions, num_heads, rank_count, state_width, num_angles
    extents = heads_per_group, head_width, save_every, num_rows, num_segments, first_segment, count, tiles
    strides = (x_stride_b, x_stride_t, x_stride_h), (B_stride_b, B_stride_t, B_stride_r, B_stride_g)
    if tl.program_id(0) % 2 == 0:
        _half_of_states(
            places, read, sizes, extents, strides, M=M, Q=Q, R=R, P=P, S=S, HAS_STARTS=HAS_STARTS, HAS_INITIAL=HAS_INITIAL,
            HAS_MIMO=HAS_MIMO, TURNS=TURNS, PRECISE=PRECISE, WALKS=WALKS, HALF=0,
        )  # fmt: skip
    else:
        _half_of_states(
            places, read, sizes, extents, strides, M=M, Q=Q, R=R, P=P, S=S, HAS_STARTS=HAS_STARTS, HAS_INITIAL=HAS_INITIAL,
            HAS_MIMO=HAS_MIMO, TURNS=TURNS, PRECISE=PRECISE, WALKS=WALKS, HALF=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _half_of_states(  # type: ignore[no-untyped-def]
    places, read, sizes, extents, strides,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_MIMO: tl.constexpr, TURNS: tl.constexpr, PRECISE: tl.constexpr, WALKS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    first_states, saved, states, last_states = places
    x, B, B_bias, mimo_x, starts, tables, cosines, sines = read
    num_positions, num_heads, rank_count, state_width, _num_angles = sizes
    heads_per_group, head_width, save_every, num_rows, num_segments, first_segment, count, tiles = extents
    x_strides, B_strides = strides
    batch, head = (tl.program_id(0) // 2).to(tl.int64), tl.program_id(1).to(tl.int64)
    group = head // heads_per_group
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, P)
    in_p, in_state = column < head_width, column * state_width
    size = head_width * state_width
    state = tl.zeros([P, S], dtype=tl.float32)
    if WALKS:
        begin_segment, end_segment = 0, count
        row = batch * num_heads + head
    else:
        begin_segment, end_segment = tl.program_id(2), tl.program_id(2) + 1
        row = (batch * num_segments + first_segment + begin_segment) * num_heads + head
    if HAS_INITIAL:
        state = load_half(first_states + row * size + in_state, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=HALF)
    for segment in range(begin_segment, end_segment):
        begin = (first_segment + segment) * save_every
        stop = tl.minimum(begin + save_every, num_positions)
        if WALKS:
            place = saved + ((batch * num_segments + first_segment + segment) * num_heads + head) * size + in_state
            store_half(place, state, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=HALF)
        for tile in range(tl.cdiv(stop - begin, Q)):
            first = begin + tile * Q
            tile_row = ((batch * count + segment) * tiles + tile) * num_heads + head
            store_part(states + (tile_row * head_width + column) * (2 * S), state, in_p, S=S, HALF=HALF)
            following, angles = first + Q + tl.arange(0, Q), (cosines, sines)
            prefetch_steps(tables, angles, batch, head, following, sizes, num_rows, S=S, TURNS=TURNS, HALF=HALF)
            at_following = x + batch * x_strides[0] + head * x_strides[2] + following.to(tl.int64) * x_strides[1]
            prefetch_rows(at_following, following < num_positions, x, WIDTH=P)
            position, rank, valid = rows_of(first, stop, rank_count, M=M, R=R)
            row_places = batch, head, group, position, rank, valid
            last = tl.minimum(first + Q, stop) - 1
            arrived, _from_start, to_end, across = decays_of(
                tables, starts, row_places, first, last, sizes, num_rows, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE
            )
            key_rows = turned_half(
                B, B_bias, angles, row_places, sizes, B_strides, R=R, S=S, NEIGHBOURS=not HAS_MIMO, TURNS=TURNS, HALF=HALF
            )
            keys = narrow(key_rows, dtype)
            values = value_rows(x, mimo_x, row_places, column, head_width, rank_count, x_strides, R=R, HAS_MIMO=HAS_MIMO)
            state = across * state + dot(tl.trans(narrow(values * (to_end * arrived)[:, None], dtype)), keys)
    if WALKS:
        store_half(last_states + row * size + in_state, state, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=HALF)
