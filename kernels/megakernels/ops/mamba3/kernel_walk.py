"""The backward kernel that walks the gradient of the state over a sequence, from its end."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, prefetch_rows, widen
from megakernels.ops.mamba3.kernel_halves import back_turn, load_half, load_part, prefetch_steps, store_half, store_part, turned_half
from megakernels.ops.mamba3.kernel_tiles import decays_of, rows_of


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_state_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_outputs, grad_final, C, C_bias, starts, tables, cosines, sines, states, grad_states, ends, passed_on, grad_initial, num_positions,
    num_heads, heads_per_group, rank_count: tl.constexpr, head_width: tl.constexpr, state_width: tl.constexpr, num_angles: tl.constexpr,
    save_every, num_rows, num_segments, first_segment, count, tiles,
    B_stride_b, B_stride_t, B_stride_r, B_stride_g,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_MIMO: tl.constexpr, TURNS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Gradients of the states after every tile of `count` segments of one sequence and head, and of the state before them.

    `states` and `grad_states` are [B, count, tiles, H, P, 2 · S]; `grad_initial` may be `grad_final`. `ends` [B, segments, tiles, H, N] has
    the gradients of the angles at the start of each tile, except for what depends on the last angle alone; `passed_on` [2, B, count, tiles,
    H] what the log decays of all positions of a tile scale in each half of the state that is carried on. A program has one half of the
    columns, as in `mamba3_state_kernel`.
    """
    places, read = (
        (grad_outputs, grad_final, states, grad_states, ends, passed_on, grad_initial),
        (C, C_bias, starts, tables, cosines, sines),
    )
    sizes = num_positions, num_heads, rank_count, state_width, num_angles
    extents = heads_per_group, head_width, save_every, num_rows, num_segments, first_segment, count, tiles
    strides = B_stride_b, B_stride_t, B_stride_r, B_stride_g
    if tl.program_id(0) % 2 == 0:
        _half_of_gradients(
            places, read, sizes, extents, strides, M=M, Q=Q, R=R, P=P, S=S, HAS_STARTS=HAS_STARTS, HAS_FINAL=HAS_FINAL, HAS_MIMO=HAS_MIMO,
            TURNS=TURNS, PRECISE=PRECISE, HALF=0,
        )  # fmt: skip
    else:
        _half_of_gradients(
            places, read, sizes, extents, strides, M=M, Q=Q, R=R, P=P, S=S, HAS_STARTS=HAS_STARTS, HAS_FINAL=HAS_FINAL, HAS_MIMO=HAS_MIMO,
            TURNS=TURNS, PRECISE=PRECISE, HALF=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _half_of_gradients(  # type: ignore[no-untyped-def]
    places, read, sizes, extents, strides,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_FINAL: tl.constexpr,
    HAS_MIMO: tl.constexpr, TURNS: tl.constexpr, PRECISE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    grad_outputs, grad_final, states, grad_states, ends, passed_on, grad_initial = places
    C, C_bias, starts, tables, cosines, sines = read
    num_positions, num_heads, rank_count, state_width, num_angles = sizes
    heads_per_group, head_width, save_every, num_rows, num_segments, first_segment, count, tiles = extents
    batch, head = (tl.program_id(0) // 2).to(tl.int64), tl.program_id(1).to(tl.int64)
    group = head // heads_per_group
    dtype: tl.constexpr = C.dtype.element_ty
    column, pair = tl.arange(0, P), tl.arange(0, S // 2)
    in_p, in_state = column < head_width, column * state_width
    whole = (batch * num_heads + head) * head_width * state_width
    at_passed = passed_on + HALF * (tl.num_programs(0) // 2).to(tl.int64) * count * tiles * num_heads
    later = tl.zeros([P, S], dtype=tl.float32)
    if HAS_FINAL:
        later = load_half(grad_final + whole + in_state, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=HALF)
    for back in tl.range(count, disable_licm=True):
        segment = count - 1 - back
        begin = (first_segment + segment) * save_every
        stop = tl.minimum(begin + save_every, num_positions)
        num_tiles = tl.cdiv(stop - begin, Q)
        for tile_back in tl.range(num_tiles, disable_licm=True):
            tile = num_tiles - 1 - tile_back
            tile_row = ((batch * count + segment) * tiles + tile) * num_heads + head
            store_part(grad_states + (tile_row * head_width + column) * (2 * S), later, in_p, S=S, HALF=HALF)
            at_before = states + (tile_row * head_width + column) * (2 * S)
            first, row, angles = begin + tile * Q, tl.arange(0, M), (cosines, sines)
            at_outputs = grad_outputs + (tile_row * M + row) * head_width
            if not PRECISE:  # products in three parts leave no register for it
                prefetch_steps(tables, angles, batch, head, first - Q + tl.arange(0, Q), sizes, num_rows, S=S, TURNS=TURNS, HALF=HALF)
                prefetch_rows(at_before - num_heads * head_width * (2 * S) + HALF * S, in_p & (tile > 0), states, WIDTH=S)
                prefetch_rows(at_outputs - num_heads * M * head_width, (row >= 0) & (tile > 0), grad_outputs, WIDTH=P)
            passed = tl.sum(later * widen(load_part(at_before, in_p, S=S, HALF=HALF)), 1)
            position, rank, valid = rows_of(first, stop, rank_count, M=M, R=R)
            row_places = batch, head, group, position, rank, valid
            last = tl.minimum(first + Q, stop) - 1
            _arrived, from_start, _to_end, across = decays_of(
                tables, starts, row_places, first, last, sizes, num_rows, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE
            )
            query_rows = turned_half(
                C, C_bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=not HAS_MIMO, TURNS=TURNS, HALF=HALF
            )
            queries = narrow(query_rows, dtype)
            grad = tl.load(at_outputs[:, None] + column[None, :], mask=valid[:, None] & in_p[None, :], other=0.0).to(tl.float32)
            later = across * later + dot(tl.trans(narrow(grad * from_start[:, None], dtype)), queries)
            tl.store(at_passed + tile_row, across * tl.sum(passed, 0))
            if HALF < TURNS:  # rotating all later queries and keys also rotates their reads of the state before the tile; this undoes it
                end_row = ((batch * num_segments + first_segment + segment) * tiles + tile) * num_heads + head
                at_end = ends + end_row * num_angles + HALF * (S // 2) + pair
                tl.store(at_end, back_turn(later, at_before, in_p, S=S, HALF=HALF), mask=HALF * (S // 2) + pair < num_angles)
    store_half(grad_initial + whole + in_state, later, in_p, state_width, S=S, NEIGHBOURS=not HAS_MIMO, HALF=HALF)
