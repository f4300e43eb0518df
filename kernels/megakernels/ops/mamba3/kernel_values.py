"""The scan's backward kernel of values: gradients of x and the input projection, and parts of those of steps."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, prefetch_rows, widen
from megakernels.ops.mamba3.kernel_halves import load_part, turned_rows
from megakernels.ops.mamba3.kernel_tiles import accumulate, decays_of, head_rows, mimo_rows, over_pairs, pairs_of, per_position, rows_of


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_value_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one head's formulas, in order
    grad_outputs, x, B, C, B_bias, C_bias, D, mimo_x, starts, tables, cosines, sines, grad_states, grad_x, steps, shares, num_positions,
    num_heads, heads_per_group, rank_count: tl.constexpr, head_width: tl.constexpr, state_width: tl.constexpr, num_angles: tl.constexpr,
    save_every, num_rows, num_shares, num_segments, first_segment, count, tiles, pieces,
    x_stride_b, x_stride_t, x_stride_h, B_stride_b, B_stride_t, B_stride_r, B_stride_g,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_MIMO: tl.constexpr, TURNS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Processes the tiles of `mamba3_output_kernel`; adds to `steps`; rows of pairs are keys."""
    piece, local = tl.program_id(0) % pieces, tl.program_id(0) // pieces
    segment, head, batch = first_segment + local, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = head // heads_per_group
    dtype: tl.constexpr = x.dtype.element_ty
    ranks = tl.arange(0, R)
    share = shares + (((batch * num_segments + segment) * pieces + piece) * num_heads + head) * num_shares
    begin = segment * save_every
    stop = tl.minimum(begin + save_every, num_positions)
    for tile in tl.range(piece * SPAN, tl.minimum(piece * SPAN + SPAN, tl.cdiv(stop - begin, Q)), disable_licm=True):
        first = begin + tile * Q
        last = tl.minimum(first + Q, stop) - 1
        position, rank, valid = rows_of(first, stop, rank_count, M=M, R=R)
        angles, strides = (cosines, sines), (B_stride_b, B_stride_t, B_stride_r, B_stride_g)
        row_places = batch, head, group, position, rank, valid
        sizes = num_positions, num_heads, rank_count, state_width, num_angles
        written = first + tl.arange(0, Q)
        there = written < stop
        columns = tl.arange(0, P)
        in_p = columns < head_width
        tile_row = ((batch * count + local) * tiles + tile) * num_heads + head
        at_outputs = grad_outputs + (tile_row * M + tl.arange(0, M)) * head_width
        at_state = grad_states + (tile_row * head_width + columns) * (2 * S)
        prefetch_rows(at_state, in_p, grad_states, WIDTH=2 * S)
        prefetch_rows(at_outputs, valid, grad_outputs, WIDTH=P)
        prefetch_rows(x + batch * x_stride_b + head * x_stride_h + written.to(tl.int64) * x_stride_t, there, x, WIDTH=P)
        arrived, _from_start, to_end, _across = decays_of(
            tables, starts, row_places, first, last, sizes, num_rows, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE
        )
        key_rows, more_key_rows = turned_rows(
            B, B_bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=not HAS_MIMO, TURNS=TURNS, ONCE=True
        )
        keys_one = narrow(key_rows, dtype)
        keys_other = narrow(more_key_rows, dtype)
        query_rows, more_query_rows = turned_rows(
            C, C_bias, angles, row_places, sizes, strides, R=R, S=S, NEIGHBOURS=not HAS_MIMO, TURNS=TURNS
        )
        queries_one = narrow(query_rows, dtype)
        queries_other = narrow(more_query_rows, dtype)
        _decay, weight, _arrived = pairs_of(
            tables, starts, row_places, first, stop, sizes, num_rows, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=True
        )
        scores = dot(keys_one, tl.trans(queries_one)) + dot(keys_other, tl.trans(queries_other))
        mixing = narrow(scores * over_pairs(weight, R=R), dtype)
        kept_weight = to_end * arrived
        skip = tl.load(D + head).to(tl.float32)
        grad = tl.load(at_outputs[:, None] + columns[None, :], mask=valid[:, None] & in_p[None, :], other=0.0)
        through = dot(keys_one, tl.trans(load_part(at_state, in_p, S=S, HALF=0)))
        through += dot(keys_other, tl.trans(load_part(at_state, in_p, S=S, HALF=1)))
        own_x = head_rows(x, batch, head, written, there, columns, head_width, x_stride_b, x_stride_t, x_stride_h)
        values = own_x[:, None, :]
        if HAS_MIMO:
            weight_x = mimo_rows(mimo_x, head, rank_count, columns, head_width, R=R)
            values *= weight_x[None, :, :]
        values = tl.reshape(values, [M, P])
        added = to_end * tl.sum(through * values, 1)
        wide = widen(grad)
        of_values = tl.reshape(dot(mixing, grad) + kept_weight[:, None] * through + skip * wide, [Q, R, P])
        if HAS_MIMO:
            of_rank = 2 * rank_count * state_width + ranks[:, None] * head_width + columns[None, :]
            in_rank = (ranks < rank_count)[:, None] & in_p[None, :]
            accumulate(share + of_rank, tl.sum(of_values * own_x[:, None, :], 0), in_rank)
            of_values *= weight_x[None, :, :]
        of_x = tl.sum(of_values, 1)
        own = ((batch * num_positions + written) * num_heads + head)[:, None] * head_width + columns[None, :]
        tl.store(grad_x + own, narrow(of_x, grad_x.dtype.element_ty), mask=there[:, None] & in_p[None, :])

        accumulate(share + num_shares - 1, tl.sum(tl.sum(wide * values, 1), 0), first >= begin)
        # a log decay scales the terms that earlier positions add to the next state
        at = steps + (batch * num_heads + head) * num_positions + written
        kept = per_position(added * arrived, M=M, R=R)
        added = per_position(added, M=M, R=R)
        accumulate(at, added, there)
        accumulate(at + num_rows, added, there)
        accumulate(at + 2 * num_rows, tl.cumsum(kept, 0) - kept, there)
        tl.debug_barrier()  # the next tile adds to values that other threads of the program have written
