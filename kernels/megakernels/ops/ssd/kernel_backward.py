"""The scan's backward kernels for states and per-head gradients: those of x, dt and the parameters."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import decay_of, ends_of, sequence_tile, slope_of, state_of, steps_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_state_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_y,
    grad_final,
    dt,
    A_log,
    C,
    dt_bias,
    starts,
    grad_states,
    grad_initial,
    num_positions,
    num_chunks,
    chunk_size,
    num_heads,
    heads_per_group,
    head_width,
    state_width,
    grad_stride_b,
    grad_stride_t,
    grad_stride_h,
    dt_stride_b,
    dt_stride_t,
    dt_stride_h,
    C_stride_b,
    C_stride_t,
    C_stride_g,
    dt_min,
    dt_max,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
):
    """Gradients of the states at the ends of all chunks of one sequence and head, and of the initial state; P of the head's columns."""
    batch, head, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    group = head // heads_per_group
    ps, ss, in_p, in_s, in_state, within, of_head = state_of(batch, head, block, num_heads, head_width, state_width, P=P, S=S)
    grad_state = tl.zeros([P, S], dtype=tl.float32)
    if HAS_FINAL:
        grad_state = tl.load(grad_final + of_head, mask=in_state, other=0.0).to(tl.float32)
    for back in range(num_chunks):
        chunk = num_chunks - 1 - back
        place = ((batch.to(tl.int64) * num_chunks + chunk) * num_heads + head) * head_width * state_width + within
        tl.store(grad_states + place, narrow(grad_state, grad_states.dtype.element_ty), mask=in_state)
        begin = chunk * chunk_size
        stop = tl.minimum(begin + chunk_size, num_positions)
        num_tiles = tl.cdiv(stop - begin, Q)
        for tile_back in range(num_tiles):
            first = begin + (num_tiles - 1 - tile_back) * Q
            position = first + tl.arange(0, Q)
            valid = position < stop
            _raw, step, rate = steps_of(
                dt, dt_bias, A_log, batch, head, position, valid, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max
            )
            last = tl.minimum(first + Q, stop) - 1
            _seen, from_start, _to_end, across, _sums, _rests = ends_of(
                starts, batch, num_positions, first, last, position, valid, step, rate, HAS_STARTS
            )
            at, mask = sequence_tile(grad_y + head * grad_stride_h, batch, position, grad_stride_b, grad_stride_t, ps, valid, in_p)
            grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            at, mask = sequence_tile(C + group * C_stride_g, batch, position, C_stride_b, C_stride_t, ss, valid, in_s)
            queries = tl.load(at, mask=mask, other=0.0)
            read = narrow(grad * from_start[:, None], grad_y.dtype.element_ty)
            grad_state = across * grad_state + dot(tl.trans(read), queries)
    tl.store(grad_initial + of_head, grad_state, mask=in_state)


@triton.jit  # type: ignore[untyped-decorator]
def ssd_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  one head's formulas, in order
    grad_y,
    x,
    dt,
    A_log,
    B,
    C,
    D,
    dt_bias,
    starts,
    states,
    grad_states,
    grad_x,
    grad_dt_parts,
    shares,
    num_positions,
    num_chunks,
    chunk_size,
    tiles_per_chunk,
    num_heads,
    heads_per_group,
    head_width,
    state_width,
    grad_stride_b,
    grad_stride_t,
    grad_stride_h,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    dt_stride_b,
    dt_stride_t,
    dt_stride_h,
    B_stride_b,
    B_stride_t,
    B_stride_g,
    C_stride_b,
    C_stride_t,
    C_stride_g,
    dt_min,
    dt_max,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Gradients of x and of dt of one tile and head, P of the head's columns.

    Gradients of dt, the parameters and log decays are sums over columns: a program writes its part [blocks, B, T, H] and share
    [blocks, B, num_tiles, 3, H]. States are held [S, P], so that every product has S rows or Q.
    """
    tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_blocks = tl.cdiv(head_width, P)
    head, block = (tl.program_id(1) // num_blocks).to(tl.int64), tl.program_id(1) % num_blocks
    group = head // heads_per_group
    chunk, tile_of_chunk = tile // tiles_per_chunk, tile % tiles_per_chunk
    begin = chunk * chunk_size
    stop = tl.minimum(begin + chunk_size, num_positions)
    first = begin + tile_of_chunk * Q
    ps, ss = block * P + tl.arange(0, P), tl.arange(0, S)
    in_p, in_s = ps < head_width, ss < state_width
    in_state = in_s[:, None] & in_p[None, :]
    within = ss[:, None] + ps[None, :] * state_width
    place = ((batch * num_chunks + chunk) * num_heads + head) * head_width * state_width + within
    # the tile's first state, from the chunk's
    state = tl.load(states + place, mask=in_state, other=0.0).to(tl.float32)
    for other in range(begin, tl.minimum(first, stop), Q):
        there = other + tl.arange(0, Q)
        exists = there < stop
        _raw, length, fall = steps_of(dt, dt_bias, A_log, batch, head, there, exists, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max)
        end = tl.minimum(other + Q, stop) - 1
        _seen, _from, onward, through, _sums, _rests = ends_of(
            starts, batch, num_positions, other, end, there, exists, length, fall, HAS_STARTS
        )
        at, mask = sequence_tile(x + head * x_stride_h, batch, there, x_stride_b, x_stride_t, ps, exists, in_p)
        written = tl.load(at, mask=mask, other=0.0).to(tl.float32) * (onward * length)[:, None]
        keys_at, mask = sequence_tile(B + group * B_stride_g, batch, there, B_stride_b, B_stride_t, ss, exists, in_s)
        state = through * state + dot(tl.trans(tl.load(keys_at, mask=mask, other=0.0)), narrow(written, x.dtype.element_ty))
    # the gradient of its last, from that of the chunk's
    grad_state = tl.load(grad_states + place, mask=in_state, other=0.0).to(tl.float32)
    for back in range(tl.cdiv(tl.maximum(stop - first - Q, 0), Q)):
        other = begin + (tl.cdiv(stop - begin, Q) - 1 - back) * Q
        there = other + tl.arange(0, Q)
        exists = there < stop
        _raw, length, fall = steps_of(dt, dt_bias, A_log, batch, head, there, exists, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max)
        end = tl.minimum(other + Q, stop) - 1
        _seen, onward, _to, through, _sums, _rests = ends_of(
            starts, batch, num_positions, other, end, there, exists, length, fall, HAS_STARTS
        )
        at, mask = sequence_tile(grad_y + head * grad_stride_h, batch, there, grad_stride_b, grad_stride_t, ps, exists, in_p)
        taken = tl.load(at, mask=mask, other=0.0).to(tl.float32) * onward[:, None]
        queries_at, mask = sequence_tile(C + group * C_stride_g, batch, there, C_stride_b, C_stride_t, ss, exists, in_s)
        grad_state = through * grad_state + dot(tl.trans(tl.load(queries_at, mask=mask, other=0.0)), narrow(taken, x.dtype.element_ty))
    passed_on = tl.sum(tl.sum(grad_state * state, 1), 0)

    position = first + tl.arange(0, Q)
    valid = position < stop
    last = tl.minimum(first + Q, stop) - 1
    _raw, step, rate = steps_of(dt, dt_bias, A_log, batch, head, position, valid, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max)
    seen, from_start, to_end, across, sums, rests = ends_of(
        starts, batch, num_positions, first, last, position, valid, step, rate, HAS_STARTS
    )
    decay = decay_of(sums, rests, position, seen, valid)
    here, mask_s = sequence_tile(B + group * B_stride_g, batch, position, B_stride_b, B_stride_t, ss, valid, in_s)
    keys = tl.load(here, mask=mask_s, other=0.0)
    here, mask_s = sequence_tile(C + group * C_stride_g, batch, position, C_stride_b, C_stride_t, ss, valid, in_s)
    queries = tl.load(here, mask=mask_s, other=0.0)
    here, mask_p = sequence_tile(grad_y + head * grad_stride_h, batch, position, grad_stride_b, grad_stride_t, ps, valid, in_p)
    grads = tl.load(here, mask=mask_p, other=0.0)
    here, mask_p = sequence_tile(x + head * x_stride_h, batch, position, x_stride_b, x_stride_t, ps, valid, in_p)
    values = tl.load(here, mask=mask_p, other=0.0)
    grad, wide = grads.to(tl.float32), values.to(tl.float32)

    read = tl.sum(dot(queries, narrow(state, x.dtype.element_ty)) * grad, 1) * from_start
    through_state = to_end[:, None] * dot(keys, narrow(grad_state, x.dtype.element_ty))
    kept = tl.sum(through_state * wide, 1) * step
    mixing = dot(queries, tl.trans(keys)) * decay
    grad_u = dot(tl.trans(narrow(mixing, x.dtype.element_ty)), grads) + through_state
    pairs = dot(grads, tl.trans(values)) * mixing * step[None, :]
    skip = tl.load(D + head).to(tl.float32)
    rows = batch * num_positions + position
    out = rows[:, None] * (num_heads * head_width) + head * head_width + ps[None, :]
    tl.store(grad_x + out, narrow(step[:, None] * grad_u + skip * grad, grad_x.dtype.element_ty), mask=mask_p)

    # What the log decay of a position scales, as in the reference: pairs across it, what later positions read from the state, what
    # earlier ones add to the next state, and the carried state. This avoids cancellation.
    later = tl.where(position[None, :] >= position[:, None], 1.0, 0.0)
    across_pairs = tl.sum((1.0 - later) * dot(later, pairs), 1)
    grad_log_decay = across_pairs + tl.cumsum(read, 0, reverse=True) + (tl.cumsum(kept, 0) - kept) + across * passed_on
    grad_log_decay = tl.where(valid, grad_log_decay, 0.0)
    # read again, for there are no registers to keep it in
    again, _step, _rate = steps_of(dt, dt_bias, A_log, batch, head, position, valid, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max)
    grad_raw = tl.where(valid, (tl.sum(grad_u * wide, 1) + rate * grad_log_decay) * slope_of(again, dt_min, dt_max), 0.0)
    part = block.to(tl.int64) * tl.num_programs(2) * num_positions * num_heads
    tl.store(grad_dt_parts + part + rows * num_heads + head, grad_raw, mask=valid)
    share = shares + (((block * tl.num_programs(2) + batch) * tl.num_programs(0) + tile) * 3) * num_heads + head
    tl.store(share, tl.sum(rate * step * grad_log_decay, 0))
    tl.store(share + num_heads, tl.sum(tl.sum(grad * wide, 1), 0))
    tl.store(share + 2 * num_heads, tl.sum(grad_raw, 0))
