"""Triton kernels of the depthwise causal convolution of up to four taps.

A program walks over its positions with the last three inputs of its channels in registers, so that each input is read once, in full
vectors. Backward it also has the three partial gradients of earlier positions, so that x and grad_y are read once and silu is computed
once; it continues for three positions after its tile, whose gradients reach back. Each program's share of the weight gradient is summed
afterwards in a fixed order: no atomics, bitwise reproducible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import given_or, narrow, on_device_of, unit_stride, widen
from megakernels._common.walks import only_if, walk_of
from megakernels.facts import block_of
from megakernels.ops.causal_conv1d.facts import (
    CONV_BACKWARD_BYTES,
    CONV_BACKWARD_POSITIONS,
    CONV_FORWARD_CHANNELS,
    CONV_FORWARD_POSITIONS,
    LARGEST_KERNEL,
)
from megakernels.ops.causal_conv1d.kernel_steps import (
    SCALE,
    age_of,
    four_at,
    inputs_before,
    offset_of,
    output_of,
    scaled_taps,
    step_back,
    store_before,
    two_at,
    with_shares,
)
from megakernels.ops.causal_conv1d.reference import Convolution

SHARES = tl.constexpr(LARGEST_KERNEL + 1)
"""Rows of a program's share of the weight gradient: the taps, right-aligned, and the bias."""


@triton.jit  # type: ignore[untyped-decorator]
def conv_forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, starts, initial, y, x_row, x_stride, num_positions, num_channels,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """POSITIONS positions of CHANNELS channels of one row of y."""
    row, first, steps, channel, inside = walk_of(num_positions, num_channels, POSITIONS=POSITIONS, CHANNELS=CHANNELS)
    x_stride = tl.cast(x_stride, tl.int64)  # of several positions
    x += row * x_row
    initial += row * (TAPS - 1) * num_channels
    now, tap_1, tap_2, tap_3 = scaled_taps(weight, channel, inside, TAPS=TAPS, SILU=SILU)
    offset = offset_of(bias, channel, inside, HAS_BIAS=HAS_BIAS, SILU=SILU)
    x_1, x_2, x_3 = inputs_before(x, initial, first, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    read = x + first * x_stride + channel
    written = y + (row * num_positions + first) * num_channels + channel
    starts += row * num_positions + first
    one, two, three, four = four_at(read, x_stride, 0, steps, channel, num_channels)
    for step in tl.range(0, steps, 4):
        read += 4 * x_stride
        next_one, next_two, next_three, next_four = four_at(read, x_stride, step + 4, steps, channel, num_channels)
        place = first + step
        age_1 = age_of(starts, place, step, steps, PACKED=PACKED)
        age_2 = age_of(starts, place + 1, step + 1, steps, PACKED=PACKED)
        age_3 = age_of(starts, place + 2, step + 2, steps, PACKED=PACKED)
        age_4 = age_of(starts, place + 3, step + 3, steps, PACKED=PACKED)
        u_1, u_2, u_3, u_4 = widen(one), widen(two), widen(three), widen(four)
        y_1 = output_of(u_1, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age_1, PACKED=PACKED, SILU=SILU)
        y_2 = output_of(u_2, u_1, x_1, x_2, offset, now, tap_1, tap_2, tap_3, age_2, PACKED=PACKED, SILU=SILU)
        y_3 = output_of(u_3, u_2, u_1, x_1, offset, now, tap_1, tap_2, tap_3, age_3, PACKED=PACKED, SILU=SILU)
        y_4 = output_of(u_4, u_3, u_2, u_1, offset, now, tap_1, tap_2, tap_3, age_4, PACKED=PACKED, SILU=SILU)
        tl.store(written, narrow(y_1, y.dtype.element_ty), mask=inside)
        tl.store(written + num_channels, narrow(y_2, y.dtype.element_ty), mask=only_if(step + 1 < steps, channel, num_channels))
        tl.store(written + 2 * num_channels, narrow(y_3, y.dtype.element_ty), mask=only_if(step + 2 < steps, channel, num_channels))
        tl.store(written + 3 * num_channels, narrow(y_4, y.dtype.element_ty), mask=only_if(step + 3 < steps, channel, num_channels))
        written += 4 * num_channels
        x_1, x_2, x_3 = u_4, u_3, u_2
        one, two, three, four = next_one, next_two, next_three, next_four


@triton.jit  # type: ignore[untyped-decorator]
def conv_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  a step's values stay in registers
    grad_y, x, weight, bias, starts, initial, grad_x, grad_initial, partial, grad_row, x_row, num_positions,
    grad_stride: tl.constexpr, x_stride: tl.constexpr,
    num_channels: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, SILU: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_INITIAL: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The gradients of POSITIONS positions of CHANNELS channels of one row, and their share of the weight gradient.

    A turn takes two positions. Each stores the gradient of the input three before it; the three positions after the tile, whose gradients
    reach back, have no share of the weight gradient. Widths are constants, so that an iteration's addresses are offsets in its
    instructions.
    """
    row, first, steps, channel, inside = walk_of(num_positions, num_channels, POSITIONS=POSITIONS, CHANNELS=CHANNELS)
    left = tl.minimum(POSITIONS + 3, num_positions - first).to(tl.int32)  # positions that exist, among those that this program reads
    if num_channels % CHANNELS == 0:
        inside = tl.full([CHANNELS], True, tl.int1)
    x += row * x_row
    grad_y += row * grad_row
    initial += row * (TAPS - 1) * num_channels
    grad_initial += row * (TAPS - 1) * num_channels
    now, tap_1, tap_2, tap_3 = scaled_taps(weight, channel, inside, TAPS=TAPS, SILU=SILU)
    offset = offset_of(bias, channel, inside, HAS_BIAS=HAS_BIAS, SILU=SILU)
    x_1, x_2, x_3 = inputs_before(x, initial, first, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    back_1 = tl.zeros([CHANNELS], dtype=tl.float32)  # partial gradient of the previous input, from later positions
    back_2 = tl.zeros([CHANNELS], dtype=tl.float32)
    back_3 = tl.zeros([CHANNELS], dtype=tl.float32)
    share = tl.zeros([CHANNELS], dtype=tl.float32)
    share_1 = tl.zeros([CHANNELS], dtype=tl.float32)
    share_2 = tl.zeros([CHANNELS], dtype=tl.float32)
    share_3 = tl.zeros([CHANNELS], dtype=tl.float32)
    share_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    read_x = x + first * x_stride + channel
    read_grad = grad_y + first * grad_stride + channel
    written = grad_x + (row * num_positions + first - 3) * num_channels + channel
    starts += row * num_positions + first
    ahead = tl.where(first == 0, TAPS - 4, 1 << 30)  # the row of `initial` that is the oldest input of the first step, if there is one
    x_now, x_later = two_at(read_x, x_stride, 0, left, channel, num_channels)
    grad_now, grad_later = two_at(read_grad, grad_stride, 0, left, channel, num_channels)
    for step in tl.range(0, steps + 3, 2):
        read_x += 2 * x_stride
        read_grad += 2 * grad_stride
        next_x, next_x_later = two_at(read_x, x_stride, step + 2, left, channel, num_channels)
        next_grad, next_grad_later = two_at(read_grad, grad_stride, step + 2, left, channel, num_channels)
        place = first.to(tl.int32) + step
        age = age_of(starts, place, step, left, PACKED=PACKED)
        later_age = age_of(starts, place + 1, step + 1, left, PACKED=PACKED)

        x_0 = widen(x_now)
        grad, seen_1, seen_2, seen_3, grad_1, grad_2, grad_3 = step_back(
            widen(grad_now), x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED=PACKED, SILU=SILU
        )
        share, share_1, share_2, share_3, share_bias = with_shares(
            share, share_1, share_2, share_3, share_bias, tl.where(step < steps, grad, 0.0), x_0, seen_1, seen_2, seen_3,
            NEEDS_WEIGHT=NEEDS_WEIGHT,
        )  # fmt: skip
        whole = back_3 + grad_3
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = grad * now

        x_later_0 = widen(x_later)
        grad, seen_1, seen_2, seen_3, grad_1, grad_2, grad_3 = step_back(
            widen(grad_later), x_later_0, x_0, x_1, x_2, offset, now, tap_1, tap_2, tap_3, later_age, PACKED=PACKED, SILU=SILU
        )
        share, share_1, share_2, share_3, share_bias = with_shares(
            share, share_1, share_2, share_3, share_bias, tl.where(step + 1 < steps, grad, 0.0), x_later_0, seen_1, seen_2, seen_3,
            NEEDS_WEIGHT=NEEDS_WEIGHT,
        )  # fmt: skip
        whole_later = back_3 + grad_3
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = grad * now

        if NEEDS_X:
            here, later = (step >= 3) & (step < steps + 3), (step >= 2) & (step < steps + 2)
            tl.store(written, narrow(whole, grad_x.dtype.element_ty), mask=only_if(here, channel, num_channels))
            tl.store(written + num_channels, narrow(whole_later, grad_x.dtype.element_ty), mask=only_if(later, channel, num_channels))
            written += 2 * num_channels
        if NEEDS_INITIAL:
            store_before(grad_initial, ahead + step, whole, channel, num_channels, TAPS=TAPS)
            store_before(grad_initial, ahead + step + 1, whole_later, channel, num_channels, TAPS=TAPS)
        x_3 = x_1
        x_2 = x_0
        x_1 = x_later_0
        x_now, x_later, grad_now, grad_later = next_x, next_x_later, next_grad, next_grad_later
    if NEEDS_WEIGHT:
        if SILU:
            share *= SCALE
            share_1 *= SCALE
            share_2 *= SCALE
            share_3 *= SCALE
            share_bias *= SCALE
        place = partial + tl.program_id(0).to(tl.int64) * SHARES * num_channels + channel
        tl.store(place, share_3, mask=inside)
        tl.store(place + num_channels, share_2, mask=inside)
        tl.store(place + 2 * num_channels, share_1, mask=inside)
        tl.store(place + 3 * num_channels, share, mask=inside)
        tl.store(place + 4 * num_channels, share_bias, mask=inside)


def forward_options(num_channels: int) -> dict[str, int]:
    """Tile and warps of the forward: four channels per thread, since eight would halve the number of warps."""
    return {"POSITIONS": CONV_FORWARD_POSITIONS, "CHANNELS": min(CONV_FORWARD_CHANNELS, block_of(num_channels, 32)), "num_warps": 2}


def backward_options(num_channels: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile and warps of the backward: a thread loads 8 bytes of a position, four channels or, of fp32, two."""
    channels = CONV_BACKWARD_BYTES // dtype.itemsize
    return {"POSITIONS": CONV_BACKWARD_POSITIONS, "CHANNELS": min(channels, block_of(num_channels, 32)), "num_warps": 2}


def forward(given: Convolution) -> Tensor:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    x, weight, bias, starts, initial, silu = given
    x = unit_stride(x)
    batch, num_positions, num_channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = forward_options(num_channels)
    if y.numel():
        with on_device_of(x):
            conv_forward_kernel[(batch * triton.cdiv(num_positions, options["POSITIONS"]), triton.cdiv(num_channels, options["CHANNELS"]))](
                x, weight.contiguous(), given_or(bias, x), given_or(starts, x), given_or(initial, x), y,
                x.stride(0), x.stride(1),
                num_positions, num_channels,
                TAPS=weight.shape[1], HAS_BIAS=bias is not None, PACKED=starts is not None, HAS_INITIAL=initial is not None, SILU=silu,
                **options,
            )  # fmt: skip
    return y


def backward(grad_y: Tensor, given: Convolution, needs: list[bool]) -> tuple[Tensor | None, ...]:
    """Follows the contract of `reference.backward`."""
    x, weight, bias, starts, initial, silu = given
    x, grad_y = unit_stride(x), unit_stride(grad_y)
    batch, num_positions, num_channels = x.shape
    options = backward_options(num_channels, x.dtype)
    num_programs = batch * triton.cdiv(num_positions, options["POSITIONS"])
    needs_weight = needs[1] or (needs[2] and bias is not None)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    grad_initial = torch.zeros(initial.shape, dtype=initial.dtype, device=x.device) if initial is not None and needs[3] else None
    shares = (num_programs if needs_weight else 0, LARGEST_KERNEL + 1, num_channels)
    partial = torch.empty(shares, dtype=torch.float32, device=x.device)
    if x.numel():
        with on_device_of(x):
            conv_backward_kernel[(num_programs, triton.cdiv(num_channels, options["CHANNELS"]))](
                grad_y, x, weight.contiguous(), given_or(bias, x), given_or(starts, x), given_or(initial, x),
                given_or(grad_x, x), given_or(grad_initial, x), partial,
                grad_y.stride(0), x.stride(0),
                num_positions,
                grad_y.stride(1), x.stride(1),
                num_channels,
                TAPS=weight.shape[1], HAS_BIAS=bias is not None, PACKED=starts is not None, HAS_INITIAL=initial is not None, SILU=silu,
                NEEDS_X=needs[0], NEEDS_INITIAL=grad_initial is not None, NEEDS_WEIGHT=needs_weight, **options,
            )  # fmt: skip
    total = partial.sum(0)
    taps = slice(LARGEST_KERNEL - weight.shape[1], LARGEST_KERNEL)
    grad_weight = _dense(total[taps].mT, weight.dtype) if needs[1] else None
    grad_bias = _dense(total[LARGEST_KERNEL], bias.dtype) if bias is not None and needs[2] else None
    return grad_x, grad_weight, grad_bias, grad_initial


def _dense(share: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, because a view would keep all shares alive."""
    return share.to(dtype, copy=True, memory_format=torch.contiguous_format)
