"""One position of the selective scan: its step, the decays of a tile of states, and what it writes to them.

A tile is [S, C], states by channels, so that a thread has all states of a channel, or half of them. Where tiles are read or written, the
factor `one`, a 1 that the compiler does not know, hides that offsets are neighbours: it would else give a thread as many as one access
reads, parts of several channels' states, and all sums over states would pass between threads.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import exp2, softplus
from megakernels._common.walks import only_if


@triton.jit  # type: ignore[untyped-decorator]
def position_inputs(  # type: ignore[no-untyped-def]
    x, dt, B, starts, position, stop,
    x_stride, dt_stride, B_stride,
    bias, rate, channel, num_channels, state, state_width,
    PACKED: tl.constexpr,
):  # fmt: skip
    """X, dt with its bias, Δ and Δ x of a position's channels [C]; decays and what is written [S, C].

    `rate` [S, C] is −exp(A_log) · log2(e). A position that is not before `stop` has Δ = 0: it leaves states as they are.
    """
    position = tl.cast(position, tl.int64)
    there = position < stop
    value = tl.load(x + position * x_stride + channel, mask=only_if(there, channel, num_channels), other=0.0).to(tl.float32)
    raw = tl.load(dt + position * dt_stride + channel, mask=only_if(there, channel, num_channels), other=0.0).to(tl.float32) + bias
    step = tl.where(there, softplus(raw), 0.0)
    decay = exp2(step[None, :] * rate)
    if PACKED:
        decay = tl.where(tl.load(starts + position, mask=there, other=-1) < position, decay, 0.0)
    keys = tl.load(B + position * B_stride + state, mask=only_if(there, state, state_width), other=0.0).to(tl.float32)
    scaled = step * value
    return value, raw, step, scaled, decay, keys[:, None] * scaled[None, :]
