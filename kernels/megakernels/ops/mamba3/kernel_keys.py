"""The scan's backward kernel of keys: gradients of rows of B, and parts of those of angles."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, widen
from megakernels.ops.mamba3.kernel_tiles import (
    accumulate,
    decays_of,
    head_rows,
    load_part,
    mimo_rows,
    over_ranks,
    pairs_of,
    rows_of,
    store_part,
    turned_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_key_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one head's formulas, in order
    grad_outputs,
    x,
    B,
    C,
    B_bias,
    C_bias,
    mimo_x,
    starts,
    tables,
    cosines,
    sines,
    grad_states,
    grad_rows,
    turned,
    num_positions,
    num_heads,
    heads_per_group,
    rank_count,
    head_width,
    state_width,
    num_angles,
    save_every,
    num_rows,
    first_segment,
    count,
    tiles,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    B_stride_b,
    B_stride_t,
    B_stride_r,
    B_stride_g,
    M: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_MIMO: tl.constexpr,
    ROTATES: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """A tile, as of `mamba3_query_kernel`, to whose `turned` it adds; rows of pairs are keys."""
    tile, local = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    segment, head, batch = first_segment + local, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = head // heads_per_group
    dtype: tl.constexpr = x.dtype.element_ty
    begin = segment * save_every
    stop = tl.minimum(begin + save_every, num_positions)
    first = begin + tile * Q
    last = tl.minimum(first + Q, stop) - 1
    position, rank, valid = rows_of(first, stop, rank_count, M=M, R=R)
    written = first + tl.arange(0, Q)
    there = written < stop
    gamma, arrived, seen, _from_start, to_end, sums, rests, _across = decays_of(
        tables,
        starts,
        batch,
        head,
        position,
        valid,
        first,
        last,
        num_positions,
        num_heads,
        num_rows,
        HAS_STARTS=HAS_STARTS,
        PRECISE=PRECISE,
    )
    tile_row = ((batch * count + local) * tiles + tile) * num_heads + head
    at_rows = grad_rows + (tile_row * M + tl.arange(0, M)) * (2 * S)
    if ROTATES:
        key_rows, more_key_rows = turned_rows(
            B,
            B_bias,
            cosines,
            sines,
            batch,
            head,
            group,
            position,
            rank,
            valid,
            first,
            stop,
            num_positions,
            num_heads,
            rank_count,
            state_width,
            num_angles,
            B_stride_b,
            B_stride_t,
            B_stride_r,
            B_stride_g,
            R=R,
            S=S,
            NEIGHBOURS=not HAS_MIMO,
            ROTATES=ROTATES,
        )
        store_part(at_rows, key_rows, valid, S=S, HALF=0)
        store_part(at_rows, more_key_rows, valid, S=S, HALF=1)
    columns = tl.arange(0, P)
    in_p = columns < tl.where(first < stop, head_width, 0)  # a short segment has fewer tiles: no states are stored there
    values = head_rows(x, batch, head, position, valid, columns, head_width, x_stride_b, x_stride_t, x_stride_h)
    if HAS_MIMO:
        values *= mimo_rows(mimo_x, head, rank, rank_count, columns, head_width)
    at_outputs = grad_outputs + (tile_row * M + tl.arange(0, M))[:, None] * head_width + columns[None, :]
    grad = tl.load(at_outputs, mask=valid[:, None] & in_p[None, :], other=0.0)
    # by position and rank: else the compiler repeats their loads in the layout that a product takes from registers
    values = tl.where(tl.reshape(valid, [Q, R])[:, :, None], tl.reshape(values, [Q, R, P]), 0.0)
    values = tl.reshape(values, [M, P])
    kept_weight = to_end * arrived
    given = narrow(values, dtype)
    grad_mixing = dot(given, tl.trans(grad))
    decay, same = pairs_of(sums, rests, position, seen, valid, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=True)
    weight = decay * arrived[:, None] + tl.where(same, gamma[:, None], 0.0)
    grad_scores = narrow(grad_mixing * weight, dtype)
    query_rows, more_query_rows = turned_rows(
        C,
        C_bias,
        cosines,
        sines,
        batch,
        head,
        group,
        position,
        rank,
        valid,
        first,
        stop,
        num_positions,
        num_heads,
        rank_count,
        state_width,
        num_angles,
        B_stride_b,
        B_stride_t,
        B_stride_r,
        B_stride_g,
        R=R,
        S=S,
        NEIGHBOURS=not HAS_MIMO,
        ROTATES=ROTATES,
    )
    queries_one = narrow(query_rows, dtype)
    queries_other = narrow(more_query_rows, dtype)
    at_state = grad_states + (tile_row * head_width + columns) * (2 * S)
    tl.debug_barrier()  # rows that other threads of the program have stored
    one = kept_weight[:, None] * dot(given, load_part(at_state, in_p, S=S, HALF=0)) + dot(grad_scores, queries_one)
    if ROTATES:
        turning = -one * widen(load_part(at_rows, valid, S=S, HALF=1))
        turned_one = widen(load_part(at_rows, valid, S=S, HALF=0))
        tl.debug_barrier()
    store_part(at_rows, one, valid, S=S, HALF=0)
    other = kept_weight[:, None] * dot(given, load_part(at_state, in_p, S=S, HALF=1)) + dot(grad_scores, queries_other)
    store_part(at_rows, other, valid, S=S, HALF=1)
    if ROTATES:
        turning += other * turned_one
        angles = tl.arange(0, S)
        at_turn = turned + ((batch * num_heads + head) * num_positions + written)[:, None] * num_angles + angles[None, :]
        accumulate(at_turn, over_ranks(turning, R=R), there[:, None] & (angles < num_angles)[None, :])
