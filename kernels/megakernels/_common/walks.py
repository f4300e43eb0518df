"""Shared by the Triton kernels that walk over positions: masks of a position's rows, and the taps of short convolutions."""

import triton
import triton.language as tl

UNROLLED = tl.constexpr(4)
"""Positions per iteration of a convolution's loop: with three earlier positions in registers, none has to be moved."""


@triton.jit
def only_if(condition, index, size):  # type: ignore[no-untyped-def]
    """The mask of the indices below `size` if a condition on a position is true, else an empty mask."""
    return index < tl.where(condition, size, 0)


@triton.jit  # type: ignore[untyped-decorator]
def tap(weight, channel, inside, DELAY: tl.constexpr, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights that multiply the values DELAY positions ago; zero after the last tap."""
    found = tl.zeros(channel.shape, dtype=tl.float32)
    if DELAY < TAPS:
        found = tl.load(weight + channel * TAPS + (TAPS - 1 - DELAY), mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def taps_of(weight, channel, inside, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of this position and of the three before it."""
    now, one = tap(weight, channel, inside, DELAY=0, TAPS=TAPS), tap(weight, channel, inside, DELAY=1, TAPS=TAPS)
    return now, one, tap(weight, channel, inside, DELAY=2, TAPS=TAPS), tap(weight, channel, inside, DELAY=3, TAPS=TAPS)


@triton.jit  # type: ignore[untyped-decorator]
def walk_of(num_positions, num_channels, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's row, first position, number of positions, channels, and which of these exist."""
    tiles = tl.cdiv(num_positions, POSITIONS)
    first = (tl.program_id(0) % tiles).to(tl.int64) * POSITIONS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    steps = tl.minimum(POSITIONS, num_positions - first).to(tl.int32)
    return (tl.program_id(0) // tiles).to(tl.int64), first, steps, channel, channel < num_channels


@triton.jit
def of_document(age, one, two, three):  # type: ignore[no-untyped-def]
    """Values of the three positions before one, zero for those before its document, which began `age` positions ago."""
    return tl.where(age >= 1, one, 0.0), tl.where(age >= 2, two, 0.0), tl.where(age >= 3, three, 0.0)
