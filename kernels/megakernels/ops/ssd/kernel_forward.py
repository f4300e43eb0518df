"""The scan's forward kernel."""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow
from megakernels.ops.ssd.kernel_tiles import decay_of, ends_of, sequence_tile, state_of, steps_of


@triton.jit  # type: ignore[untyped-decorator]
def ssd_forward_kernel(  # type: ignore[no-untyped-def]
    x,
    dt,
    A_log,
    B,
    C,
    D,
    dt_bias,
    starts,
    initial,
    y,
    states,
    final,
    num_positions,
    num_chunks,
    chunk_size,
    num_heads,
    heads_per_group,
    head_width,
    state_width,
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
    HAS_INITIAL: tl.constexpr,
):
    """All positions of one sequence and head, P of the head's columns: the rows of a state are independent."""
    batch, head, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    group = head // heads_per_group
    ps, ss, in_p, in_s, in_state, within, of_head = state_of(batch, head, block, num_heads, head_width, state_width, P=P, S=S)
    state = tl.zeros([P, S], dtype=tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial + of_head, mask=in_state, other=0.0).to(tl.float32)
    skip = tl.load(D + head).to(tl.float32)
    for chunk in range(num_chunks):
        place = ((batch.to(tl.int64) * num_chunks + chunk) * num_heads + head) * head_width * state_width + within
        tl.store(states + place, narrow(state, states.dtype.element_ty), mask=in_state)
        stop = tl.minimum((chunk + 1) * chunk_size, num_positions)
        for first in range(chunk * chunk_size, stop, Q):
            position = first + tl.arange(0, Q)
            valid = position < stop
            _raw, step, rate = steps_of(
                dt, dt_bias, A_log, batch, head, position, valid, dt_stride_b, dt_stride_t, dt_stride_h, dt_min, dt_max
            )
            last = tl.minimum(first + Q, stop) - 1
            seen, from_start, to_end, across, sums, rests = ends_of(
                starts, batch, num_positions, first, last, position, valid, step, rate, HAS_STARTS
            )
            decay = decay_of(sums, rests, position, seen, valid) * step[None, :]
            at, mask = sequence_tile(x + head * x_stride_h, batch, position, x_stride_b, x_stride_t, ps, valid, in_p)
            values = tl.load(at, mask=mask, other=0.0)
            at, mask_s = sequence_tile(B + group * B_stride_g, batch, position, B_stride_b, B_stride_t, ss, valid, in_s)
            keys = tl.load(at, mask=mask_s, other=0.0)
            at, mask_s = sequence_tile(C + group * C_stride_g, batch, position, C_stride_b, C_stride_t, ss, valid, in_s)
            queries = tl.load(at, mask=mask_s, other=0.0)

            wide = values.to(tl.float32)
            mixing = dot(queries, tl.trans(keys)) * decay
            found = dot(narrow(mixing, x.dtype.element_ty), values)
            found += from_start[:, None] * dot(queries, tl.trans(narrow(state, x.dtype.element_ty)))
            found += skip * wide
            out = (batch.to(tl.int64) * num_positions + position)[:, None] * (num_heads * head_width) + head * head_width + ps[None, :]
            tl.store(y + out, narrow(found, y.dtype.element_ty), mask=mask)
            written = narrow(wide * (to_end * step)[:, None], x.dtype.element_ty)
            state = across * state + dot(tl.trans(written), keys)
    tl.store(final + of_head, state, mask=in_state)
