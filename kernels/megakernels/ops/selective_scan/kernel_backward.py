"""The backward kernel: a program walks over one sequence from its end, with the states' gradients of its channels in registers.

For each segment it first recomputes the states from the saved one, and keeps that before every second position in memory; the others are
made once more where they are needed, in registers.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, narrow, sigmoid
from megakernels._common.walks import only_if
from megakernels.ops.selective_scan.facts import GROUP_POSITIONS
from megakernels.ops.selective_scan.kernel_steps import channel_constants, position_inputs

GROUP = tl.constexpr(GROUP_POSITIONS)
"""Positions whose states are in registers at once."""


@triton.jit  # type: ignore[untyped-decorator]
def state_after(before, scan, position, stop, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The states after a position, from those before it."""
    _value, _raw, _step, _scaled, decay, written = position_inputs(scan, position, stop, PACKED=PACKED)
    return decay * before + written


@triton.jit  # type: ignore[untyped-decorator]
def step_back(  # type: ignore[no-untyped-def]
    before, scan, position, stop, outputs, grads, sum_A, sum_D, sum_bias, PACKED: tl.constexpr
):
    """The gradients of one position and of the states before it, from those of the states after it, and the sums with what it adds.

    `before` are the states [S, C] before it; `sum_A` is the sum of ∂L/∂log a · Δ. `outputs` has grad_y and C of the sequence, their
    strides, D, and the destinations of the gradients of x and dt and of the shares of B's and C's gradients.
    """
    value, raw, step, scaled, decay, written = position_inputs(scan, position, stop, PACKED=PACKED)
    _x, _dt, B, _starts, strides, _bias, rate, channel, num_channels, state, state_width = scan
    grad_y, C, grad_stride, C_stride, skip, grad_x, grad_dt, part_B, part_C = outputs
    far = tl.cast(position, tl.int64)
    there = far < stop
    grad = tl.load(grad_y + far * grad_stride + channel, mask=only_if(there, channel, num_channels), other=0.0).to(tl.float32)
    queries = tl.load(C + far * C_stride + state, mask=only_if(there, state, state_width), other=0.0).to(tl.float32)
    keys = tl.load(B + far * strides[2] + state, mask=only_if(there, state, state_width), other=0.0).to(tl.float32)
    grads += queries[:, None] * grad[None, :]
    of_queries = tl.sum((decay * before + written) * grad[None, :], 1)
    tl.store(part_C + far * state_width + state, of_queries, mask=only_if(there, state, state_width))
    tl.store(part_B + far * state_width + state, tl.sum(grads * scaled[None, :], 1), mask=only_if(there, state, state_width))
    of_scaled = tl.sum(grads * keys[:, None], 0)
    grads *= decay
    of_log = grads * before
    of_raw = (of_scaled * value + tl.sum(of_log * rate, 0) / LOG2_E) * sigmoid(raw)
    at = far * num_channels + channel
    tl.store(grad_x + at, narrow(of_scaled * step + skip * grad, grad_x.dtype.element_ty), mask=only_if(there, channel, num_channels))
    tl.store(grad_dt + at, narrow(of_raw, grad_dt.dtype.element_ty), mask=only_if(there, channel, num_channels))
    sum_A += of_log * step[None, :]
    sum_D += grad * value
    sum_bias += tl.where(there, of_raw, 0.0)
    return grads, sum_A, sum_D, sum_bias


@triton.jit(do_not_specialize=["one"])  # type: ignore[untyped-decorator]
def selective_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, dt, A_log, B, C, D, dt_bias, starts, states, recomputed, grad_last, grad_x, grad_dt, parts, sums, grad_first, num_positions,
    num_segments, save_every, num_groups, num_channels, state_width,
    grad_row, grad_stride, x_row, x_stride, dt_row, dt_stride, B_row, B_stride, C_row, C_stride, one,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, PACKED: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """The gradients of one sequence and CHANNELS channels.

    grad_x and grad_dt [B, T, I]; parts [2, blocks of channels, B, T, S], what these channels add to the gradients of B and C; sums
    [B, I, S + 2], the gradients of A_log, D and dt_bias; grad_first [B, I, S]. Scratch: `recomputed` [B, blocks, num_groups, STATES,
    CHANNELS].
    """
    batch, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    lane, state = tl.arange(0, CHANNELS), tl.arange(0, STATES)
    channel = block * CHANNELS + lane
    in_channels, inside, of_state, rate, skip, bias = channel_constants(A_log, D, dt_bias, channel, num_channels, state, state_width, one)
    num_states = tl.cast(num_channels, tl.int64) * state_width
    x += batch * x_row
    dt += batch * dt_row
    B += batch * B_row
    C += batch * C_row
    grad_y += batch * grad_row
    starts += batch * num_positions
    grad_x += batch * num_positions * num_channels
    grad_dt += batch * num_positions * num_channels
    part_B = parts + (block * tl.num_programs(0) + batch) * num_positions * state_width
    part_C = parts + ((num_blocks + block) * tl.num_programs(0) + batch) * num_positions * state_width
    scan = x, dt, B, starts, (x_stride, dt_stride, B_stride), bias, rate, channel, num_channels, state, state_width
    outputs = grad_y, C, grad_stride, C_stride, skip, grad_x, grad_dt, part_B, part_C
    recomputed += (batch * num_blocks + block) * num_groups * STATES * CHANNELS + (state[:, None] * CHANNELS + lane[None, :]) * one
    grads = tl.zeros([STATES, CHANNELS], dtype=tl.float32)
    if HAS_LAST:
        grads = tl.load(grad_last + batch * num_states + of_state, mask=inside, other=0.0).to(tl.float32)
    sum_A = tl.zeros([STATES, CHANNELS], dtype=tl.float32)
    sum_D = tl.zeros([CHANNELS], dtype=tl.float32)
    sum_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    for back in range(num_segments):
        segment = num_segments - 1 - back
        begin = segment * save_every
        stop = tl.minimum(begin + save_every, num_positions)
        groups = tl.cdiv(stop - begin, GROUP)
        now = tl.load(states + (batch * num_segments + segment) * num_states + of_state, mask=inside, other=0.0).to(tl.float32)
        for group in range(groups):
            tl.store(recomputed + group * STATES * CHANNELS, now)
            for place in tl.static_range(GROUP):
                now = state_after(now, scan, begin + group * GROUP + place, stop, PACKED=PACKED)
        tl.debug_barrier()  # other threads of the program may read a value that one thread has written
        for group_back in range(groups):
            group = groups - 1 - group_back
            first = begin + group * GROUP
            state_0 = tl.load(recomputed + group * STATES * CHANNELS).to(tl.float32)
            state_1 = state_after(state_0, scan, first, stop, PACKED=PACKED)
            grads, sum_A, sum_D, sum_bias = step_back(state_1, scan, first + 1, stop, outputs, grads, sum_A, sum_D, sum_bias, PACKED=PACKED)
            grads, sum_A, sum_D, sum_bias = step_back(state_0, scan, first, stop, outputs, grads, sum_A, sum_D, sum_bias, PACKED=PACKED)
        tl.debug_barrier()  # the next segment overwrites this one's states
    width = state_width + 2
    row = (batch * num_channels + channel) * width
    tl.store(sums + (row[None, :] + state[:, None]) * one, sum_A * rate / LOG2_E, mask=inside)
    tl.store(sums + row + state_width, sum_D, mask=in_channels)
    tl.store(sums + row + state_width + 1, sum_bias, mask=in_channels)
    tl.store(grad_first + batch * num_states + of_state, grads, mask=inside)
