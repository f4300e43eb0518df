"""One position of the selective scan: its step, the decays of a tile of states, and what it writes to them.

A tile is [S, C], states by channels, so that a thread has all states of a channel, or half of them. Where tiles are read or written, the
factor `one`, a 1 that the compiler does not know, hides that offsets are neighbours: it would else give a thread as many as one access
reads, parts of several channels' states, and all sums over states would pass between threads.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import LOG2_E, exp2, softplus
from megakernels._common.walks import only_if


@triton.jit
def channel_constants(A_log, D, dt_bias, channel, num_channels, state, state_width, one):  # type: ignore[no-untyped-def]
    """Masks of channels and of their states, the states' offsets, and A, D and dt_bias of the channels; A is −exp(A_log) · log2(e)."""
    in_channels = channel < num_channels
    inside = (state < state_width)[:, None] & in_channels[None, :]
    of_state = (channel[None, :] * state_width + state[:, None]) * one
    rate = -tl.exp(tl.load(A_log + of_state, mask=inside, other=0.0).to(tl.float32)) * LOG2_E
    skip = tl.load(D + channel, mask=in_channels, other=0.0).to(tl.float32)
    return in_channels, inside, of_state, rate, skip, tl.load(dt_bias + channel, mask=in_channels, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def position_inputs(scan, position, stop, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, dt with its bias, Δ and Δ x of a position's channels [C]; decays and what is written [S, C].

    `scan` has x, dt, B and starts of the sequence, the strides of the first three, dt_bias, the rate [S, C], channels and their number,
    states and theirs. A position that is not before `stop` has Δ = 0: it does not change states.
    """
    x, dt, B, starts, strides, bias, rate, channel, num_channels, state, state_width = scan
    position = tl.cast(position, tl.int64)
    there = position < stop
    value = tl.load(x + position * strides[0] + channel, mask=only_if(there, channel, num_channels), other=0.0).to(tl.float32)
    raw = tl.load(dt + position * strides[1] + channel, mask=only_if(there, channel, num_channels), other=0.0).to(tl.float32) + bias
    step = tl.where(there, softplus(raw), 0.0)
    decay = exp2(step[None, :] * rate)
    if PACKED:
        decay = tl.where(tl.load(starts + position, mask=there, other=-1) < position, decay, 0.0)
    keys = tl.load(B + position * strides[2] + state, mask=only_if(there, state, state_width), other=0.0).to(tl.float32)
    scaled = step * value
    return value, raw, step, scaled, decay, keys[:, None] * scaled[None, :]
