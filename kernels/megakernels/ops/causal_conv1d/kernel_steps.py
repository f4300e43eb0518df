"""Shared by the convolution's kernels: taps, inputs before a tile, and one position of the backward."""

import math

import triton
import triton.language as tl

from megakernels._common.tiles import exp2, narrow, reciprocal
from megakernels._common.walks import of_document, only_if, taps_of

SCALE = tl.constexpr(-math.log2(math.e))
"""Factor of the taps and the bias with silu: a power of two of their sum is then the exponential of the negated sum."""
SQUARE = tl.constexpr(SCALE.value**2)


@triton.jit  # type: ignore[untyped-decorator]
def scaled_taps(weight, channel, inside, TAPS: tl.constexpr, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """`taps_of`, scaled for silu."""
    now, one, two, three = taps_of(weight, channel, inside, TAPS=TAPS)
    if SILU:
        now, one, two, three = now * SCALE, one * SCALE, two * SCALE, three * SCALE
    return now, one, two, three


@triton.jit  # type: ignore[untyped-decorator]
def offset_of(bias, channel, inside, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bias, scaled if silu follows; zeros if the convolution has no bias."""
    found = tl.zeros(channel.shape, dtype=tl.float32)
    if HAS_BIAS:
        found = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return found * SCALE if SILU else found


@triton.jit  # type: ignore[untyped-decorator]
def inputs_at(x, initial, position, x_stride, num_positions, channel, num_channels, TAPS: tl.constexpr, HAS_INITIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inputs at one position: `initial` before the first, zero without it."""
    there = only_if((position >= 0) & (position < num_positions), channel, num_channels)
    value = tl.load(x + position * x_stride + channel, mask=there, other=0.0).to(tl.float32)
    if HAS_INITIAL:
        row = position + (TAPS - 1)
        before = only_if((position < 0) & (row >= 0), channel, num_channels)
        value += tl.load(initial + row * num_channels + channel, mask=before, other=0.0).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def inputs_before(  # type: ignore[no-untyped-def]
    x, initial, first, x_stride, num_positions, channel, num_channels, TAPS: tl.constexpr, HAS_INITIAL: tl.constexpr
):
    """The inputs at the three positions before `first`, from the nearest."""
    one = inputs_at(x, initial, first - 1, x_stride, num_positions, channel, num_channels, TAPS, HAS_INITIAL)
    two = inputs_at(x, initial, first - 2, x_stride, num_positions, channel, num_channels, TAPS, HAS_INITIAL)
    return one, two, inputs_at(x, initial, first - 3, x_stride, num_positions, channel, num_channels, TAPS, HAS_INITIAL)


@triton.jit
def two_at(read, stride, step, stop, channel, num_channels):  # type: ignore[no-untyped-def]
    """The rows of two positions of a walk from `step` on, as stored; zeros from `stop` on."""
    first = tl.load(read, mask=only_if(step < stop, channel, num_channels), other=0.0)
    return first, tl.load(read + stride, mask=only_if(step + 1 < stop, channel, num_channels), other=0.0)


@triton.jit
def four_at(read, stride, step, stop, channel, num_channels):  # type: ignore[no-untyped-def]
    """The rows of four positions, as `two_at`."""
    one, two = two_at(read, stride, step, stop, channel, num_channels)
    three, four = two_at(read + 2 * stride, stride, step + 2, stop, channel, num_channels)
    return one, two, three, four


@triton.jit  # type: ignore[untyped-decorator]
def age_of(starts, position, step, stop, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions since the position's document began; `starts` is that of the walk. Without documents it is not read."""
    if PACKED:
        return position - tl.load(starts + step, mask=step < stop, other=0)
    else:  # noqa: RET505  one branch is compiled
        return position


@triton.jit  # type: ignore[untyped-decorator]
def output_of(  # type: ignore[no-untyped-def]
    x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED: tl.constexpr, SILU: tl.constexpr
):
    """The output at one position, from its input and the three before it."""
    if PACKED:
        x_1, x_2, x_3 = of_document(age, x_1, x_2, x_3)
    total = offset + x_0 * now + x_1 * tap_1 + x_2 * tap_2 + x_3 * tap_3
    return total * reciprocal(SCALE + SCALE * exp2(total)) if SILU else total


@triton.jit  # type: ignore[untyped-decorator]
def store_before(grad_initial, row, whole, channel, num_channels, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of an input before the first position, if `row` is such an input."""
    mask = only_if((row >= 0) & (row < TAPS - 1), channel, num_channels)
    tl.store(grad_initial + row * num_channels + channel, narrow(whole, grad_initial.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def step_back(  # type: ignore[no-untyped-def]
    grad, x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED: tl.constexpr, SILU: tl.constexpr
):
    """One position: the gradient before silu, the earlier inputs that it read, and their gradients; `age` counts from its document.

    With silu the gradient is divided by `SCALE`, so that its products with scaled taps are right as they are: with a the scaled sum and s
    the sigmoid, silu' = s · (1 + a / SCALE · (1 − s)) = SCALE · (s / SCALE²) · (SCALE + a · (1 − s)).
    """
    if PACKED:
        x_1, x_2, x_3 = of_document(age, x_1, x_2, x_3)
    if SILU:
        total = offset + x_0 * now + x_1 * tap_1 + x_2 * tap_2 + x_3 * tap_3
        share = reciprocal(SQUARE + SQUARE * exp2(total))
        grad = grad * share * (SCALE + total * (1.0 - SQUARE * share))
    grad_1 = grad * tap_1
    grad_2 = grad * tap_2
    grad_3 = grad * tap_3
    if PACKED:
        grad_1, grad_2, grad_3 = of_document(age, grad_1, grad_2, grad_3)
    return grad, x_1, x_2, x_3, grad_1, grad_2, grad_3


@triton.jit  # type: ignore[untyped-decorator]
def with_shares(  # type: ignore[no-untyped-def]
    share, share_1, share_2, share_3, share_bias, grad, x_0, x_1, x_2, x_3, NEEDS_WEIGHT: tl.constexpr
):
    """The weight gradient with one more position: of the taps, from the latest, and of the bias."""
    if NEEDS_WEIGHT:
        share += grad * x_0
        share_1 += grad * x_1
        share_2 += grad * x_2
        share_3 += grad * x_3
        share_bias += grad
    return share, share_1, share_2, share_3, share_bias
