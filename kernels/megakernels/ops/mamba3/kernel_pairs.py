"""The scan's backward kernel of queries and keys: gradients of rows of C and B, and parts of those of steps and angles."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, prefetch_rows
from megakernels.ops.mamba3.kernel_halves import load_part, store_parted, turned_rows, turning
from megakernels.ops.mamba3.kernel_tiles import (
    accumulate,
    decays_of,
    over_pairs,
    over_ranks,
    pairs_of,
    pairs_over_ranks,
    rows_of,
    value_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_pair_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one head's formulas, in order
    grad_outputs, x, B, C, B_bias, C_bias, mimo_x, starts, tables, cosines, sines, states, grad_states, grad_queries, grad_keys, turned,
    steps, passed_on, num_positions, num_heads, heads_per_group, rank_count: tl.constexpr, head_width: tl.constexpr,
    state_width: tl.constexpr, num_angles: tl.constexpr, save_every, num_rows, first_segment, count, tiles,
    x_stride_b, x_stride_t, x_stride_h, B_stride_b, B_stride_t, B_stride_r, B_stride_g,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_MIMO: tl.constexpr,
    TURNS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """A tile of a segment of one sequence and head, with the state before it, the gradient of the one after it, and those of outputs.

    `grad_queries` and `grad_keys` [B, count, tiles, H, M, 2 · S] have the gradients of rotated rows of C and of B, and before them the
    rows, which then take no registers; `steps` [3, B, H, T] those of γ + w, of w and of log decays, whose last part is added to what is
    there, with `passed_on` of `mamba3_state_gradient_kernel`; `turned` [B, H, T, N] those of each position's angle θ. A loop over tiles
    would hold more in registers.
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
    angles, strides = (cosines, sines), (B_stride_b, B_stride_t, B_stride_r, B_stride_g)
    row_places = batch, head, group, position, rank, valid
    sizes = num_positions, num_heads, rank_count, state_width, num_angles
    written = first + tl.arange(0, Q)
    there = written < stop
    tile_row = ((batch * count + local) * tiles + tile) * num_heads + head
    at_state = (tile_row * head_width + columns) * (2 * S)
    at_outputs = grad_outputs + (tile_row * M + tl.arange(0, M)) * head_width
    prefetch_rows(at_outputs, valid & (first < stop), grad_outputs, WIDTH=P)
    prefetch_rows(x + batch * x_stride_b + head * x_stride_h + written.to(tl.int64) * x_stride_t, there, x, WIDTH=P)
    prefetch_rows(states + at_state, in_p, states, WIDTH=2 * S)
    prefetch_rows(grad_states + at_state, in_p, grad_states, WIDTH=2 * S)
    arrived, from_start, to_end, _across = decays_of(
        tables, starts, row_places, first, last, sizes, num_rows, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE
    )
    key_rows, more_key_rows = turned_rows(B, B_bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=not HAS_MIMO, TURNS=TURNS)
    keys_one = narrow(key_rows, dtype)
    keys_other = narrow(more_key_rows, dtype)
    query_rows, more_query_rows = turned_rows(
        C, C_bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=not HAS_MIMO, TURNS=TURNS, ONCE=True
    )
    queries_one = narrow(query_rows, dtype)
    queries_other = narrow(more_query_rows, dtype)
    rows = (tile_row * M + tl.arange(0, M)) * (2 * S)
    at_queries, at_keys = grad_queries + rows, grad_keys + rows
    if TURNS > 0:
        store_parted(at_queries, query_rows, valid, S=S, HALF=0)
        store_parted(at_keys, key_rows, valid, S=S, HALF=0)
    if TURNS > 1:
        store_parted(at_queries, more_query_rows, valid, S=S, HALF=1)
        store_parted(at_keys, more_key_rows, valid, S=S, HALF=1)
    values = value_rows(
        x, mimo_x, row_places, columns, head_width, rank_count, (x_stride_b, x_stride_t, x_stride_h), R=R, HAS_MIMO=HAS_MIMO
    )
    grad = tl.load(at_outputs[:, None] + columns[None, :], mask=valid[:, None] & in_p[None, :], other=0.0)
    scores = dot(queries_one, tl.trans(keys_one)) + dot(queries_other, tl.trans(keys_other))
    given = narrow(values, dtype)
    grad_mixing = dot(grad, tl.trans(given))
    decay, weight, arriving = pairs_of(
        tables, starts, row_places, first, stop, sizes, num_rows, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=False
    )
    grad_weight = pairs_over_ranks(grad_mixing * scores, R=R)
    of_gamma = tl.sum(tl.where(written[:, None] == written[None, :], grad_weight, 0.0), 1)
    faded = grad_weight * decay
    of_arrived = tl.sum(faded, 0)
    if PRECISE:  # only the pairs across a position, not the difference of larger sums
        later = tl.cumsum(faded * arriving[None, :], 0, reverse=True)
        log_decay = tl.sum(tl.where(written[None, :] < written[:, None], later, 0.0), 1)
    else:
        log_decay = tl.cumsum(tl.sum(faded * arriving[None, :], 1) - of_arrived * arriving, 0, reverse=True)
    at = steps + (batch * num_heads + head) * num_positions + written
    tl.store(at, of_gamma + of_arrived, mask=there)
    tl.store(at + num_rows, of_arrived, mask=there)
    halves = passed_on + tile_row, passed_on + tl.num_programs(2).to(tl.int64) * count * tiles * num_heads + tile_row
    log_decay += tl.load(halves[0], mask=first < stop, other=0.0).to(tl.float32)
    log_decay += tl.load(halves[1], mask=first < stop, other=0.0).to(tl.float32)
    accumulate(at + 2 * num_rows, log_decay, there)

    grad_scores = narrow(grad_mixing * over_pairs(weight, R=R), dtype)
    scores_by_key = tl.trans(grad_scores)
    kept_weight = to_end * arrived
    pair = tl.arange(0, S // 2)
    at_turn = turned + ((batch * num_heads + head) * num_positions + written)[:, None] * num_angles + pair[None, :]
    tl.debug_barrier()  # rows that other threads of the program have stored
    of_queries = from_start[:, None] * dot(grad, load_part(states + at_state, in_p, S=S, HALF=0)) + dot(grad_scores, keys_one)
    if TURNS > 0:
        turn = turning(of_queries, at_queries, valid, S=S, HALF=0)
        tl.debug_barrier()
    store_parted(at_queries, of_queries, valid, S=S, HALF=0)
    of_keys = kept_weight[:, None] * dot(given, load_part(grad_states + at_state, in_p, S=S, HALF=0)) + dot(scores_by_key, queries_one)
    if TURNS > 0:
        turn += turning(of_keys, at_keys, valid, S=S, HALF=0)
        tl.store(at_turn, over_ranks(turn, R=R), mask=there[:, None] & (pair < num_angles)[None, :])
        tl.debug_barrier()
    store_parted(at_keys, of_keys, valid, S=S, HALF=0)
    of_queries = from_start[:, None] * dot(grad, load_part(states + at_state, in_p, S=S, HALF=1)) + dot(grad_scores, keys_other)
    if TURNS > 1:
        turn = turning(of_queries, at_queries, valid, S=S, HALF=1)
        tl.debug_barrier()
    store_parted(at_queries, of_queries, valid, S=S, HALF=1)
    of_keys = kept_weight[:, None] * dot(given, load_part(grad_states + at_state, in_p, S=S, HALF=1)) + dot(scores_by_key, queries_other)
    if TURNS > 1:
        turn += turning(of_keys, at_keys, valid, S=S, HALF=1)
        tl.store(at_turn + S // 2, over_ranks(turn, R=R), mask=there[:, None] & (S // 2 + pair < num_angles)[None, :])
        tl.debug_barrier()
    store_parted(at_keys, of_keys, valid, S=S, HALF=1)
