"""Shared by both kernels: products, their sum over the taps, and which of the last values a tap reads."""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow
from megakernels._common.walks import only_if


@triton.jit  # type: ignore[untyped-decorator]
def rounded_product(a, b, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product of a and b with the rounding of `dtype`, in fp32."""
    product = narrow(a * b, dtype)
    return product.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def product_before(  # type: ignore[no-untyped-def]
    input_gate, value, before, position, input_stride, value_stride, channel, num_channels, TAPS: tl.constexpr, HAS_BEFORE: tl.constexpr
):
    """The product at a position before the program's: read from `before` ahead of the row's first, zero without it."""
    there = only_if(position >= 0, channel, num_channels)
    gate = tl.load(input_gate + position * input_stride + channel, mask=there, other=0.0).to(tl.float32)
    found = rounded_product(
        gate, tl.load(value + position * value_stride + channel, mask=there, other=0.0).to(tl.float32), value.dtype.element_ty
    )
    if HAS_BEFORE:
        row = position + (TAPS - 1)
        ahead = only_if((position < 0) & (row >= 0), channel, num_channels)
        found += tl.load(before + row * num_channels + channel, mask=ahead, other=0.0).to(tl.float32)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def products_before(  # type: ignore[no-untyped-def]
    input_gate, value, before, first, input_stride, value_stride, channel, num_channels, TAPS: tl.constexpr, HAS_BEFORE: tl.constexpr
):
    """The products at the three positions before `first`, from the nearest."""
    one = product_before(input_gate, value, before, first - 1, input_stride, value_stride, channel, num_channels, TAPS, HAS_BEFORE)
    two = product_before(input_gate, value, before, first - 2, input_stride, value_stride, channel, num_channels, TAPS, HAS_BEFORE)
    three = product_before(input_gate, value, before, first - 3, input_stride, value_stride, channel, num_channels, TAPS, HAS_BEFORE)
    return one, two, three


@triton.jit  # type: ignore[untyped-decorator]
def convolved(offset, u_0, u_1, u_2, u_3, now, tap_1, tap_2, tap_3, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the taps."""
    total = offset + u_0 * now
    if TAPS > 1:
        total += u_1 * tap_1
    if TAPS > 2:
        total += u_2 * tap_2
    if TAPS > 3:
        total += u_3 * tap_3
    return total


@triton.jit  # type: ignore[untyped-decorator]
def oldest(zero, one, two, three, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The one of four values, of this position and of three before it, that the last tap reads."""
    found = zero
    if TAPS > 1:
        found = one
    if TAPS > 2:
        found = two
    if TAPS > 3:
        found = three
    return found
