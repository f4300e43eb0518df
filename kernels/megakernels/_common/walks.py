"""Shared by the Triton kernels that walk over positions: masks of a position's rows, and the taps of short convolutions."""

import triton
import triton.language as tl

UNROLLED = tl.constexpr(4)
"""Positions that a turn of a convolution's walk takes: with the values of three earlier positions in registers, none is moved."""


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
