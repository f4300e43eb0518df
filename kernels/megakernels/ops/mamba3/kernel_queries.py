"""The scan's backward kernel of queries: gradients of rows of C, and parts of those of steps and angles."""

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
    per_position,
    rows_of,
    store_part,
    turned_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_query_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one head's formulas, in order
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
    states,
    grad_rows,
    turned,
    steps,
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
    """A tile of a segment of one sequence and head, with the state before it and the gradients of outputs before the gate.

    `grad_rows` [B, count, tiles, H, M, 2 · S] has the gradients of rotated rows of C, and before them the rows, which then take no
    registers; `steps` [3, B, H, T] those of γ + w, of w and of log decays, whose last part is added to what `mamba3_output_kernel` wrote;
    `turned` [B, H, T, N] those of each position's angle θ, to which the key kernel adds. A loop over tiles would hold more in registers.
    """
    tile, local = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    segment, head, batch = first_segment + local, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = head // heads_per_group
    dtype: tl.constexpr = x.dtype.element_ty
    begin = segment * save_every
    stop = tl.minimum(begin + save_every, num_positions)
    first = begin + tile * Q
    columns = tl.arange(0, P)
    in_p = columns < tl.where(first < stop, head_width, 0)  # a short segment has fewer tiles: no states are stored there
    last = tl.minimum(first + Q, stop) - 1
    position, rank, valid = rows_of(first, stop, rank_count, M=M, R=R)
    written = first + tl.arange(0, Q)
    there = written < stop
    gamma, arrived, seen, from_start, _to_end, sums, rests, _across = decays_of(
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
    keys_one = narrow(key_rows, dtype)
    keys_other = narrow(more_key_rows, dtype)
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
        SELECTS=True,
    )
    queries_one = narrow(query_rows, dtype)
    queries_other = narrow(more_query_rows, dtype)
    tile_row = ((batch * count + local) * tiles + tile) * num_heads + head
    at_rows = grad_rows + (tile_row * M + tl.arange(0, M)) * (2 * S)
    if ROTATES:
        store_part(at_rows, query_rows, valid, S=S, HALF=0)
        store_part(at_rows, more_query_rows, valid, S=S, HALF=1)
    values = head_rows(x, batch, head, position, valid, columns, head_width, x_stride_b, x_stride_t, x_stride_h)
    if HAS_MIMO:
        values *= mimo_rows(mimo_x, head, rank, rank_count, columns, head_width)
    at_outputs = grad_outputs + (tile_row * M + tl.arange(0, M))[:, None] * head_width + columns[None, :]
    grad = tl.load(at_outputs, mask=valid[:, None] & in_p[None, :], other=0.0)
    scores = dot(queries_one, tl.trans(keys_one)) + dot(queries_other, tl.trans(keys_other))
    grad_mixing = dot(grad, tl.trans(narrow(values, dtype)))
    decay, same = pairs_of(sums, rests, position, seen, valid, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=False)
    grad_weight = grad_mixing * scores
    of_gamma = tl.sum(tl.where(same, grad_weight, 0.0), 1)
    faded = grad_weight * decay
    of_arrived = tl.sum(faded, 0)
    if PRECISE:  # only the pairs across a position, not the difference of larger sums
        later = tl.cumsum(faded * arrived[None, :], 0, reverse=True)
        log_decay = tl.sum(tl.where(position[None, :] < position[:, None], later, 0.0), 1)
        log_decay = per_position(tl.where(valid & (rank == 0), log_decay, 0.0), M=M, R=R)
    else:
        pairs = tl.sum(faded * arrived[None, :], 1) - of_arrived * arrived
        log_decay = tl.cumsum(per_position(pairs, M=M, R=R), 0, reverse=True)
    at = steps + (batch * num_heads + head) * num_positions + written
    of_arrived = per_position(of_arrived, M=M, R=R)
    tl.store(at, per_position(of_gamma, M=M, R=R) + of_arrived, mask=there)
    tl.store(at + num_rows, of_arrived, mask=there)
    accumulate(at + 2 * num_rows, log_decay, there)

    weight = decay * arrived[None, :] + tl.where(same, gamma[:, None], 0.0)
    grad_scores = narrow(grad_mixing * weight, dtype)
    at_state = states + (tile_row * head_width + columns) * (2 * S)
    tl.debug_barrier()  # rows that other threads of the program have stored
    one = from_start[:, None] * dot(grad, load_part(at_state, in_p, S=S, HALF=0)) + dot(grad_scores, keys_one)
    if ROTATES:
        turning = -one * widen(load_part(at_rows, valid, S=S, HALF=1))
        turned_one = widen(load_part(at_rows, valid, S=S, HALF=0))
        tl.debug_barrier()
    store_part(at_rows, one, valid, S=S, HALF=0)
    other = from_start[:, None] * dot(grad, load_part(at_state, in_p, S=S, HALF=1)) + dot(grad_scores, keys_other)
    store_part(at_rows, other, valid, S=S, HALF=1)
    if ROTATES:
        turning += other * turned_one
        angles = tl.arange(0, S)
        at_turn = turned + ((batch * num_heads + head) * num_positions + written)[:, None] * num_angles + angles[None, :]
        tl.store(at_turn, over_ranks(turning, R=R), mask=there[:, None] & (angles < num_angles)[None, :])
