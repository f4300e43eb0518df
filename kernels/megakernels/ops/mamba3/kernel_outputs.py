"""The scan's kernel of outputs; in the backward it has the gradients of z, the output projections and D, and of outputs before the gate."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, exp, narrow, reciprocal
from megakernels.ops.mamba3.kernel_tiles import (
    accumulate,
    decays_of,
    head_rows,
    load_part,
    mimo_rows,
    over_positions,
    over_ranks,
    pairs_of,
    per_position,
    rows_of,
    turned_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_output_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one head's formulas, in order
    grad_y,
    x,
    z,
    B,
    C,
    B_bias,
    C_bias,
    D,
    mimo_x,
    mimo_z,
    mimo_o,
    starts,
    tables,
    cosines,
    sines,
    states,
    y,
    grad_z,
    grad_outputs,
    steps,
    shares,
    num_positions,
    num_heads,
    heads_per_group,
    rank_count,
    head_width,
    state_width,
    num_angles,
    save_every,
    num_rows,
    num_shares,
    num_segments,
    first_segment,
    count,
    tiles,
    pieces,
    grad_stride_b,
    grad_stride_t,
    grad_stride_h,
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
    W: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_MIMO: tl.constexpr,
    ROTATES: tl.constexpr,
    PRECISE: tl.constexpr,
    GRADIENTS: tl.constexpr,
):
    """Up to SPAN tiles of a segment of one sequence and head, with the states before them: y, or with `GRADIENTS` those of its gate.

    `states` [B, count, tiles, H, P, 2 · S] has those before each tile of `count` segments from `first_segment` on, `grad_outputs`
    [B, count, tiles, H, M, head width] the gradients of each rank's outputs. The gradients of parameters are sums over these tiles, which
    the program adds up in memory: `shares` [B, segments, pieces, H, num_shares], zero before, has those of B_bias, C_bias, mimo_x, mimo_z,
    mimo_o and D, one after the other. `steps` [3, B, H, T] has in its last part what log decays scale in outputs that are read from the
    state. Columns are processed W at a time: the registers do not hold more.
    """
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
        decay, same = pairs_of(sums, rests, position, seen, valid, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=False)
        weight = decay * arrived[None, :] + tl.where(same, gamma[:, None], 0.0)
        scores = dot(queries_one, tl.trans(keys_one)) + dot(queries_other, tl.trans(keys_other))
        mixing = narrow(scores * weight, dtype)
        reads, of_skip = tl.zeros([M], dtype=tl.float32), tl.zeros([M], dtype=tl.float32)
        skip = tl.load(D + head).to(tl.float32)
        tile_row = ((batch * count + local) * tiles + tile) * num_heads + head
        for begin_column in range(0, P, W):
            columns = begin_column + tl.arange(0, W)
            in_p = columns < head_width
            values = head_rows(x, batch, head, position, valid, columns, head_width, x_stride_b, x_stride_t, x_stride_h)
            if HAS_MIMO:
                values *= mimo_rows(mimo_x, head, rank, rank_count, columns, head_width)
            at_state = states + (tile_row * head_width + columns) * (2 * S)
            read = dot(queries_one, tl.trans(load_part(at_state, in_p, S=S, HALF=0)))
            read += dot(queries_other, tl.trans(load_part(at_state, in_p, S=S, HALF=1)))
            read *= from_start[:, None]
            found = dot(mixing, narrow(values, dtype)) + read + skip * values
            own_z = head_rows(z, batch, head, position, valid, columns, head_width, x_stride_b, x_stride_t, x_stride_h)
            inner = own_z
            if HAS_MIMO:
                inner = own_z * mimo_rows(mimo_z, head, rank, rank_count, columns, head_width)
            opened = reciprocal(1.0 + exp(-inner))
            gate = inner * opened
            own = ((batch * num_positions + written) * num_heads + head)[:, None] * head_width + columns[None, :]
            in_own = there[:, None] & in_p[None, :]
            if GRADIENTS:
                grad = head_rows(grad_y, batch, head, position, valid, columns, head_width, grad_stride_b, grad_stride_t, grad_stride_h)
                slope = found * opened * (1.0 + inner - gate)
                if HAS_MIMO:
                    of_rank = ranks[:, None] * head_width + columns[None, :]
                    in_rank = (ranks < rank_count)[:, None] & in_p[None, :]
                    of_weights = share + 2 * rank_count * state_width + rank_count * head_width + of_rank
                    accumulate(of_weights + rank_count * head_width, over_positions(grad * found * gate, R=R), in_rank)
                    grad *= mimo_rows(mimo_o, head, rank, rank_count, columns, head_width)
                    slope *= grad
                    accumulate(of_weights, over_positions(slope * own_z, R=R), in_rank)
                    slope *= mimo_rows(mimo_z, head, rank, rank_count, columns, head_width)
                else:
                    slope *= grad
                tl.store(grad_z + own, narrow(over_ranks(slope, R=R), grad_z.dtype.element_ty), mask=in_own)
                grad *= gate
                of_skip += tl.sum(grad * values, 1)
                reads += tl.sum(read * grad, 1)
                out = grad_outputs + (tile_row * M + tl.arange(0, M))[:, None] * head_width + columns[None, :]
                tl.store(out, narrow(grad, dtype), mask=in_p[None, :])
            else:
                if HAS_MIMO:
                    found *= mimo_rows(mimo_o, head, rank, rank_count, columns, head_width)
                tl.store(y + own, narrow(over_ranks(found * gate, R=R), y.dtype.element_ty), mask=in_own)
        if GRADIENTS:
            accumulate(share + num_shares - 1, tl.sum(of_skip, 0), first >= begin)
            at = steps + (batch * num_heads + head) * num_positions + written
            tl.store(at + 2 * num_rows, tl.cumsum(per_position(reads, M=M, R=R), 0, reverse=True), mask=there)
            tl.debug_barrier()  # the next tile adds to what other threads of the program have written
