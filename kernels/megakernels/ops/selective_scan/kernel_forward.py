"""The forward kernel: a program walks over all positions of one sequence with the states of its channels in registers."""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow
from megakernels.ops.selective_scan.kernel_steps import channel_constants, position_inputs


@triton.jit(do_not_specialize=["one"])  # type: ignore[untyped-decorator]
def selective_forward_kernel(  # type: ignore[no-untyped-def]
    x, dt, A_log, B, C, D, dt_bias, starts, first, y, states, last, num_positions, num_segments, save_every, num_channels, state_width,
    x_row, x_stride, dt_row, dt_stride, B_row, B_stride, C_row, C_stride, one,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, PACKED: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Y [B, T, I], the states before each segment [B, segments, I, S], and the last ones [B, I, S]."""
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    state = tl.arange(0, STATES)
    in_channels, inside, of_state, rate, skip, bias = channel_constants(A_log, D, dt_bias, channel, num_channels, state, state_width, one)
    num_states = tl.cast(num_channels, tl.int64) * state_width
    x += batch * x_row
    dt += batch * dt_row
    B += batch * B_row
    C += batch * C_row
    starts += batch * num_positions
    scan = x, dt, B, starts, (x_stride, dt_stride, B_stride), bias, rate, channel, num_channels, state, state_width
    now = tl.zeros([STATES, CHANNELS], dtype=tl.float32)
    if HAS_FIRST:
        now = tl.load(first + batch * num_states + of_state, mask=inside, other=0.0).to(tl.float32)
    for segment in range(num_segments):
        tl.store(states + (batch * num_segments + segment) * num_states + of_state, now, mask=inside)
        stop = tl.minimum((segment + 1) * save_every, num_positions)
        for position in range(segment * save_every, stop):
            value, _raw, _step, _scaled, decay, written = position_inputs(scan, position, stop, PACKED=PACKED)
            now = decay * now + written
            far = tl.cast(position, tl.int64)
            queries = tl.load(C + far * C_stride + state, mask=state < state_width, other=0.0).to(tl.float32)
            found = tl.sum(queries[:, None] * now, 0) + skip * value
            tl.store(y + (batch * num_positions + far) * num_channels + channel, narrow(found, y.dtype.element_ty), mask=in_channels)
    tl.store(last + batch * num_states + of_state, now, mask=inside)
