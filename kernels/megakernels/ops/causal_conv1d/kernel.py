"""Triton kernels of the depthwise causal convolution of up to four taps.

A program walks over its positions with the last three inputs of its channels in registers, so that each input is read once and in whole
vectors. Backward it also has the three partial gradients of earlier positions, so that x and grad_y are read once and silu is computed
once; it continues for three positions after its tile, whose gradients reach back. Each program's share of the weight gradient is summed
afterwards in a fixed order: no atomics, bitwise reproducible.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.blocks import block_of
from megakernels._common.tiles import exp2, narrow, on_device_of, reciprocal, unit_stride
from megakernels.ops.causal_conv1d.reference import Convolution

LARGEST_KERNEL = 4
"""Maximum number of taps; more use the reference."""

FORWARD_POSITIONS, BACKWARD_POSITIONS = 64, 128
FORWARD_CHANNELS, BACKWARD_CHANNELS = 256, 256
UNROLLED = tl.constexpr(4)
"""Positions that a turn of a walk takes: with the inputs of three earlier positions in registers, none is moved."""
SCALE = tl.constexpr(-math.log2(math.e))
"""With silu the taps and the bias are multiplied by this: a power of two of their sum is then the exponential of the negated sum."""
SQUARE = tl.constexpr(SCALE.value**2)
SHARES = tl.constexpr(LARGEST_KERNEL + 1)
"""Rows of a program's share of the weight gradient: the taps, right-aligned, and the bias."""


@triton.jit  # type: ignore[untyped-decorator]
def tap(weight, channel, inside, DELAY: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights that multiply the inputs DELAY positions ago, scaled for silu: zero after the last tap."""
    found = tl.zeros(channel.shape, dtype=tl.float32)
    if DELAY < TAPS:
        found = tl.load(weight + channel * TAPS + (TAPS - 1 - DELAY), mask=inside, other=0.0).to(tl.float32)
    return found * SCALE if SILU else found


@triton.jit
def only_if(condition, channel, num_channels):  # type: ignore[no-untyped-def]
    """The mask of a row's channels if a condition on its position is true, else an empty mask."""
    return channel < tl.where(condition, num_channels, 0)


@triton.jit  # type: ignore[untyped-decorator]
def inputs_at(x, initial, position, x_stride, num_positions, channel, num_channels, TAPS: tl.constexpr, HAS_INITIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inputs at one position or at a column of them: `initial` before the first, zero without it."""
    there = only_if((position >= 0) & (position < num_positions), channel, num_channels)
    value = tl.load(x + position * x_stride + channel, mask=there, other=0.0).to(tl.float32)
    if HAS_INITIAL:
        row = position + (TAPS - 1)
        before = only_if((position < 0) & (row >= 0), channel, num_channels)
        value += tl.load(initial + row * num_channels + channel, mask=before, other=0.0).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def conv_forward_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    starts,
    initial,
    y,
    x_row,
    x_stride,
    num_positions,
    num_channels,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SILU: tl.constexpr,
):
    """POSITIONS positions of CHANNELS channels of one row of y."""
    tiles = tl.cdiv(num_positions, POSITIONS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * POSITIONS
    steps = tl.minimum(POSITIONS, num_positions - first).to(tl.int32)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < num_channels
    x += row * x_row
    initial += row * (TAPS - 1) * num_channels
    now = tap(weight, channel, inside, DELAY=0, TAPS=TAPS, SILU=SILU)
    tap_1 = tap(weight, channel, inside, DELAY=1, TAPS=TAPS, SILU=SILU)
    tap_2 = tap(weight, channel, inside, DELAY=2, TAPS=TAPS, SILU=SILU)
    tap_3 = tap(weight, channel, inside, DELAY=3, TAPS=TAPS, SILU=SILU)
    offset = tl.zeros([CHANNELS], dtype=tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        offset = offset * SCALE if SILU else offset
    x_1 = inputs_at(x, initial, first - 1, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    x_2 = inputs_at(x, initial, first - 2, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    x_3 = inputs_at(x, initial, first - 3, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    read = x + first * x_stride + channel
    written = y + (row * num_positions + first) * num_channels + channel
    starts += row * num_positions + first
    for step in tl.range(0, steps, loop_unroll_factor=UNROLLED):
        x_0 = tl.load(read, mask=inside, other=0.0).to(tl.float32)
        seen_1 = x_1
        seen_2 = x_2
        seen_3 = x_3
        if PACKED:
            place = first + step - tl.load(starts + step)
            seen_1 = tl.where(place >= 1, x_1, 0.0)
            seen_2 = tl.where(place >= 2, x_2, 0.0)
            seen_3 = tl.where(place >= 3, x_3, 0.0)
        total = offset + x_0 * now + seen_1 * tap_1 + seen_2 * tap_2 + seen_3 * tap_3
        if SILU:
            total = total * reciprocal(SCALE + SCALE * exp2(total))
        tl.store(written, narrow(total, y.dtype.element_ty), mask=inside)
        read += x_stride
        written += num_channels
        x_3 = x_2
        x_2 = x_1
        x_1 = x_0


@triton.jit  # type: ignore[untyped-decorator]
def step_back(  # type: ignore[no-untyped-def]
    grad, x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED: tl.constexpr, SILU: tl.constexpr
):
    """One position: the gradient before silu, the earlier inputs that it saw, and what these get of it; `age` counts from its document.

    With silu the gradient is divided by `SCALE`, so that its products with scaled taps are right as they are: with a the scaled sum and s
    the sigmoid, silu' = s · (1 + a / SCALE · (1 − s)) = SCALE · (s / SCALE²) · (SCALE + a · (1 − s)).
    """
    if PACKED:
        x_1 = tl.where(age >= 1, x_1, 0.0)
        x_2 = tl.where(age >= 2, x_2, 0.0)
        x_3 = tl.where(age >= 3, x_3, 0.0)
    if SILU:
        total = offset + x_0 * now + x_1 * tap_1 + x_2 * tap_2 + x_3 * tap_3
        share = reciprocal(SQUARE + SQUARE * exp2(total))
        grad = grad * share * (SCALE + total * (1.0 - SQUARE * share))
    grad_1 = grad * tap_1
    grad_2 = grad * tap_2
    grad_3 = grad * tap_3
    if PACKED:
        grad_1 = tl.where(age >= 1, grad_1, 0.0)
        grad_2 = tl.where(age >= 2, grad_2, 0.0)
        grad_3 = tl.where(age >= 3, grad_3, 0.0)
    return grad, x_1, x_2, x_3, grad_1, grad_2, grad_3


@triton.jit  # type: ignore[untyped-decorator]
def conv_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  a step's values stay in registers
    grad_y,
    x,
    weight,
    bias,
    starts,
    initial,
    grad_x,
    grad_initial,
    partial,
    grad_row,
    grad_stride,
    x_row,
    x_stride,
    num_positions,
    num_channels,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SILU: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_INITIAL: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
):
    """The gradients of POSITIONS positions of CHANNELS channels of one row, and their share of the weight gradient."""
    tiles = tl.cdiv(num_positions, POSITIONS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * POSITIONS
    steps = tl.minimum(POSITIONS, num_positions - first).to(tl.int32)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < num_channels
    x += row * x_row
    grad_y += row * grad_row
    initial += row * (TAPS - 1) * num_channels
    grad_initial += row * (TAPS - 1) * num_channels
    now = tap(weight, channel, inside, DELAY=0, TAPS=TAPS, SILU=SILU)
    tap_1 = tap(weight, channel, inside, DELAY=1, TAPS=TAPS, SILU=SILU)
    tap_2 = tap(weight, channel, inside, DELAY=2, TAPS=TAPS, SILU=SILU)
    tap_3 = tap(weight, channel, inside, DELAY=3, TAPS=TAPS, SILU=SILU)
    offset = tl.zeros([CHANNELS], dtype=tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        offset = offset * SCALE if SILU else offset
    x_1 = inputs_at(x, initial, first - 1, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    x_2 = inputs_at(x, initial, first - 2, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    x_3 = inputs_at(x, initial, first - 3, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
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
    ahead = tl.where(first == 0, TAPS - 4, 1 << 30)  # row of `initial` that the first step's oldest input is, if there is one
    for step in tl.range(0, steps, loop_unroll_factor=UNROLLED):
        x_0 = tl.load(read_x, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(read_grad, mask=inside, other=0.0).to(tl.float32)
        age = POSITIONS
        if PACKED:
            age = first.to(tl.int32) + step - tl.load(starts + step)
        grad, seen_1, seen_2, seen_3, grad_1, grad_2, grad_3 = step_back(
            grad, x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED=PACKED, SILU=SILU
        )
        if NEEDS_WEIGHT:
            share += grad * x_0
            share_1 += grad * seen_1
            share_2 += grad * seen_2
            share_3 += grad * seen_3
            share_bias += grad
        whole = back_3 + grad_3
        if NEEDS_X:
            tl.store(written, narrow(whole, grad_x.dtype.element_ty), mask=only_if(step >= 3, channel, num_channels))
        if NEEDS_INITIAL:
            place = grad_initial + (ahead + step) * num_channels + channel
            reaches = (step < 3) & (ahead + step >= 0) & (ahead + step < TAPS - 1)
            tl.store(place, narrow(whole, grad_initial.dtype.element_ty), mask=only_if(reaches, channel, num_channels))
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = grad * now
        x_3 = x_2
        x_2 = x_1
        x_1 = x_0
        read_x += x_stride
        read_grad += grad_stride
        written += num_channels
    for more in tl.static_range(3):  # positions of the next program, whose gradients reach back
        step = steps + more
        here = only_if(first + step < num_positions, channel, num_channels)
        x_0 = tl.load(read_x, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(read_grad, mask=here, other=0.0).to(tl.float32)
        age = POSITIONS
        if PACKED:
            age = first.to(tl.int32) + step - tl.load(starts + step, mask=first + step < num_positions, other=0)
        grad, seen_1, seen_2, seen_3, grad_1, grad_2, grad_3 = step_back(
            grad, x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED=PACKED, SILU=SILU
        )
        whole = back_3 + grad_3
        if NEEDS_X:
            tl.store(written, narrow(whole, grad_x.dtype.element_ty), mask=only_if(step >= 3, channel, num_channels))
        if NEEDS_INITIAL:
            place = grad_initial + (ahead + step) * num_channels + channel
            reaches = (step < 3) & (ahead + step >= 0) & (ahead + step < TAPS - 1)
            tl.store(place, narrow(whole, grad_initial.dtype.element_ty), mask=only_if(reaches, channel, num_channels))
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = grad * now
        x_3 = x_2
        x_2 = x_1
        x_1 = x_0
        read_x += x_stride
        read_grad += grad_stride
        written += num_channels
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
    """Tile and warps of the forward: eight channels per thread."""
    return {"POSITIONS": FORWARD_POSITIONS, "CHANNELS": min(FORWARD_CHANNELS, block_of(num_channels, 32)), "num_warps": 1}


def backward_options(num_channels: int) -> dict[str, int]:
    """Tile and warps of the backward: four channels per thread."""
    channels = min(BACKWARD_CHANNELS, block_of(num_channels, 32))
    return {"POSITIONS": BACKWARD_POSITIONS, "CHANNELS": channels, "num_warps": max(1, channels // 128)}


def forward(given: Convolution) -> Tensor:
    """Same contract as `reference.forward`, for fp32, bf16 and fp16."""
    x, weight, bias, starts, initial, silu = given
    x = unit_stride(x)
    batch, num_positions, num_channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = forward_options(num_channels)
    if y.numel():
        with on_device_of(x):
            conv_forward_kernel[(batch * triton.cdiv(num_positions, options["POSITIONS"]), triton.cdiv(num_channels, options["CHANNELS"]))](
                x,
                weight.contiguous(),
                _or(bias, x),
                _or(starts, x),
                _or(initial, x),
                y,
                x.stride(0),
                x.stride(1),
                num_positions,
                num_channels,
                TAPS=weight.shape[1],
                HAS_BIAS=bias is not None,
                PACKED=starts is not None,
                HAS_INITIAL=initial is not None,
                SILU=silu,
                **options,
            )
    return y


def backward(grad_y: Tensor, given: Convolution, needs: list[bool]) -> tuple[Tensor | None, ...]:
    """Same contract as `reference.backward`."""
    x, weight, bias, starts, initial, silu = given
    x, grad_y = unit_stride(x), unit_stride(grad_y)
    batch, num_positions, num_channels = x.shape
    options = backward_options(num_channels)
    num_programs = batch * triton.cdiv(num_positions, options["POSITIONS"])
    needs_weight = needs[1] or (needs[2] and bias is not None)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    grad_initial = torch.zeros(initial.shape, dtype=initial.dtype, device=x.device) if initial is not None and needs[3] else None
    shares = (num_programs if needs_weight else 0, LARGEST_KERNEL + 1, num_channels)
    partial = torch.empty(shares, dtype=torch.float32, device=x.device)
    if x.numel():
        with on_device_of(x):
            conv_backward_kernel[(num_programs, triton.cdiv(num_channels, options["CHANNELS"]))](
                grad_y,
                x,
                weight.contiguous(),
                _or(bias, x),
                _or(starts, x),
                _or(initial, x),
                _or(grad_x, x),
                _or(grad_initial, x),
                partial,
                grad_y.stride(0),
                grad_y.stride(1),
                x.stride(0),
                x.stride(1),
                num_positions,
                num_channels,
                TAPS=weight.shape[1],
                HAS_BIAS=bias is not None,
                PACKED=starts is not None,
                HAS_INITIAL=initial is not None,
                SILU=silu,
                NEEDS_X=needs[0],
                NEEDS_INITIAL=grad_initial is not None,
                NEEDS_WEIGHT=needs_weight,
                **options,
            )
    total = partial.sum(0)
    taps = slice(LARGEST_KERNEL - weight.shape[1], LARGEST_KERNEL)
    grad_weight = _dense(total[taps].mT, weight.dtype) if needs[1] else None
    grad_bias = _dense(total[LARGEST_KERNEL], bias.dtype) if bias is not None and needs[2] else None
    return grad_x, grad_weight, grad_bias, grad_initial


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`tensor`, or a placeholder that the kernel does not read."""
    return other if tensor is None else tensor.contiguous()


def _dense(share: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, because a view would keep all shares alive."""
    return share.to(dtype, copy=True, memory_format=torch.contiguous_format)
