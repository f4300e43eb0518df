"""The scan's kernel of outputs; in the backward it has the gradients of z, the output projections and D, and of outputs before the gate."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, exp, narrow, prefetch_rows, reciprocal
from megakernels.ops.mamba3.kernel_halves import load_part, turned_rows
from megakernels.ops.mamba3.kernel_tiles import (
    accumulate,
    decays_of,
    head_rows,
    mimo_rows,
    over_pairs,
    pairs_of,
    per_position,
    rows_of,
    value_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def mamba3_output_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one head's formulas, in order
    grad_y, x, z, B, C, B_bias, C_bias, D, mimo_x, mimo_z, mimo_o, starts, tables, cosines, sines, states, y, grad_z, grad_outputs, steps,
    shares, num_positions, num_heads, heads_per_group, rank_count: tl.constexpr, head_width: tl.constexpr, state_width: tl.constexpr,
    num_angles: tl.constexpr, save_every, num_rows, num_shares, num_segments, first_segment, count, tiles, pieces,
    grad_stride_b, grad_stride_t, grad_stride_h, x_stride_b, x_stride_t, x_stride_h, B_stride_b, B_stride_t, B_stride_r, B_stride_g,
    M: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, P: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, HAS_STARTS: tl.constexpr,
    HAS_MIMO: tl.constexpr, TURNS: tl.constexpr, PRECISE: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Up to SPAN tiles of a segment of one sequence and head, with the states before them: y, or with `GRADIENTS` those of its gate.

    `states` [B, count, tiles, H, P, 2 · S] has those before each tile of `count` segments from `first_segment` on, `grad_outputs`
    [B, count, tiles, H, M, head width] the gradients of each rank's outputs. The gradients of parameters are sums over these tiles, which
    the program adds up in memory: `shares` [B, segments, pieces, H, num_shares], zero before, has those of B_bias, C_bias, mimo_x, mimo_z,
    mimo_o and D, one after the other. `steps` [3, B, H, T] has in its last part what log decays scale in outputs that are read from the
    state.
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
        angles, strides = (cosines, sines), (B_stride_b, B_stride_t, B_stride_r, B_stride_g)
        row_places = batch, head, group, position, rank, valid
        sizes = num_positions, num_heads, rank_count, state_width, num_angles
        written = first + tl.arange(0, Q)
        there = written < stop
        columns = tl.arange(0, P)
        in_p = columns < head_width
        tile_row = ((batch * count + local) * tiles + tile) * num_heads + head
        at_state = states + (tile_row * head_width + columns) * (2 * S)
        in_head = batch * x_stride_b + head * x_stride_h + written.to(tl.int64) * x_stride_t
        prefetch_rows(at_state, in_p, states, WIDTH=2 * S)
        prefetch_rows(x + in_head, there, x, WIDTH=P)
        prefetch_rows(z + in_head, there, z, WIDTH=P)
        if GRADIENTS:
            prefetch_rows(
                grad_y + batch * grad_stride_b + head * grad_stride_h + written.to(tl.int64) * grad_stride_t, there, grad_y, WIDTH=P
            )
        _arrived, from_start, _to_end, _across = decays_of(
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
        _decay, weight, _arrived = pairs_of(
            tables, starts, row_places, first, stop, sizes, num_rows, Q=Q, HAS_STARTS=HAS_STARTS, PRECISE=PRECISE, KEYS=False
        )
        scores = dot(queries_one, tl.trans(keys_one)) + dot(queries_other, tl.trans(keys_other))
        mixing = narrow(scores * over_pairs(weight, R=R), dtype)
        skip = tl.load(D + head).to(tl.float32)
        values = value_rows(
            x, mimo_x, row_places, columns, head_width, rank_count, (x_stride_b, x_stride_t, x_stride_h), R=R, HAS_MIMO=HAS_MIMO
        )
        read = dot(queries_one, tl.trans(load_part(at_state, in_p, S=S, HALF=0)))
        read += dot(queries_other, tl.trans(load_part(at_state, in_p, S=S, HALF=1)))
        read *= from_start[:, None]
        found = dot(mixing, narrow(values, dtype)) + read
        own_x = skip * head_rows(x, batch, head, written, there, columns, head_width, x_stride_b, x_stride_t, x_stride_h)
        through_skip = own_x[:, None, :]
        if HAS_MIMO:
            through_skip *= mimo_rows(mimo_x, head, rank_count, columns, head_width, R=R)[None, :, :]
        by_rank = tl.reshape(found, [Q, R, P]) + through_skip
        own_z = head_rows(z, batch, head, written, there, columns, head_width, x_stride_b, x_stride_t, x_stride_h)
        inner = own_z[:, None, :]
        if HAS_MIMO:
            weight_z = mimo_rows(mimo_z, head, rank_count, columns, head_width, R=R)
            weight_o = mimo_rows(mimo_o, head, rank_count, columns, head_width, R=R)
            inner *= weight_z[None, :, :]
        # rows that do not exist may have any value: recomputing a mask from a product would need another layout
        inner = tl.where(tl.reshape(valid, [Q, R])[:, :, None], inner, by_rank)
        opened = reciprocal(1.0 + exp(-inner))
        gate = inner * opened
        own = ((batch * num_positions + written) * num_heads + head)[:, None] * head_width + columns[None, :]
        in_own = there[:, None] & in_p[None, :]
        if GRADIENTS:
            grad = head_rows(grad_y, batch, head, written, there, columns, head_width, grad_stride_b, grad_stride_t, grad_stride_h)
            slope = grad[:, None, :] * (opened + gate * (1.0 - opened))
            of_found = grad[:, None, :] * gate
            if HAS_MIMO:
                of_rank = ranks[:, None] * head_width + columns[None, :]
                in_rank = (ranks < rank_count)[:, None] & in_p[None, :]
                of_weights = share + 2 * rank_count * state_width + rank_count * head_width + of_rank
                accumulate(of_weights + rank_count * head_width, tl.sum(of_found * by_rank, 0), in_rank)
                of_found *= weight_o[None, :, :]
            of_found = tl.reshape(of_found, [M, P])
            reads = tl.sum(read * of_found, 1)
            out = grad_outputs + (tile_row * M + tl.arange(0, M))[:, None] * head_width + columns[None, :]
            tl.store(out, narrow(of_found, dtype), mask=in_p[None, :])
            slope *= by_rank
            if HAS_MIMO:
                accumulate(of_weights, weight_o * tl.sum(own_z[:, None, :] * slope, 0), in_rank)
                slope *= (weight_z * weight_o)[None, :, :]
            tl.store(grad_z + own, narrow(tl.sum(slope, 1), grad_z.dtype.element_ty), mask=in_own)
        else:
            opened_rows = by_rank * gate
            if HAS_MIMO:
                opened_rows *= weight_o[None, :, :]
            tl.store(y + own, narrow(tl.sum(opened_rows, 1), y.dtype.element_ty), mask=in_own)
        if GRADIENTS:
            at = steps + (batch * num_heads + head) * num_positions + written
            tl.store(at + 2 * num_rows, tl.cumsum(per_position(reads, M=M, R=R), 0, reverse=True), mask=there)
            tl.debug_barrier()  # the next tile adds to values that other threads of the program have written
