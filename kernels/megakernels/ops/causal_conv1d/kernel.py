"""Triton kernels of the depthwise causal convolution of up to four taps.

A program walks over its positions with the last three inputs of its channels in registers, so that each input is read once and in whole
vectors. Backward it also has the three partial gradients of earlier positions, so that x and grad_y are read once and silu is computed
once; it continues for three positions after its tile, whose gradients reach back. Each program's share of the weight gradient is summed
afterwards in a fixed order: no atomics, bitwise reproducible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import exp2, narrow, on_device_of, reciprocal, unit_stride, widen
from megakernels._common.walks import UNROLLED, of_document, only_if, walk_of
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
    inputs_before,
    offset_of,
    scaled_taps,
    step_back,
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
    x += row * x_row
    initial += row * (TAPS - 1) * num_channels
    now, tap_1, tap_2, tap_3 = scaled_taps(weight, channel, inside, TAPS=TAPS, SILU=SILU)
    offset = offset_of(bias, channel, inside, HAS_BIAS=HAS_BIAS, SILU=SILU)
    x_1, x_2, x_3 = inputs_before(x, initial, first, x_stride, num_positions, channel, num_channels, TAPS=TAPS, HAS_INITIAL=HAS_INITIAL)
    read = x + first * x_stride + channel
    written = y + (row * num_positions + first) * num_channels + channel
    starts += row * num_positions + first
    for step in tl.range(0, steps, loop_unroll_factor=UNROLLED):
        x_0 = widen(tl.load(read, mask=inside))
        seen_1 = x_1
        seen_2 = x_2
        seen_3 = x_3
        if PACKED:
            place = first + step - tl.load(starts + step)
            seen_1, seen_2, seen_3 = of_document(place, x_1, x_2, x_3)
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
def conv_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  a step's values stay in registers
    grad_y, x, weight, bias, starts, initial, grad_x, grad_initial, partial, grad_row, x_row, num_positions,
    grad_stride: tl.constexpr, x_stride: tl.constexpr,
    num_channels: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, SILU: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_INITIAL: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The gradients of POSITIONS positions of CHANNELS channels of one row, and their share of the weight gradient.

    The first three positions and the three after the tile, whose gradients reach back, are outside the loop: inside, each position stores
    the gradient of the input three before it. Widths are constants, so that a turn's addresses are offsets in its instructions.
    """
    row, first, steps, channel, inside = walk_of(num_positions, num_channels, POSITIONS=POSITIONS, CHANNELS=CHANNELS)
    left = tl.minimum(POSITIONS + 3, num_positions - first).to(tl.int32)  # positions that exist, of those this program reads
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
    written = grad_x + (row * num_positions + first) * num_channels + channel
    starts += row * num_positions + first
    ahead = tl.where(first == 0, TAPS - 4, 1 << 30)  # row of `initial` that the first step's oldest input is, if there is one
    for step in tl.static_range(3):
        here = only_if(left > step, channel, num_channels)
        x_0 = widen(tl.load(read_x + step * x_stride, mask=here, other=0.0))
        grad = widen(tl.load(read_grad + step * grad_stride, mask=here, other=0.0))
        age = POSITIONS
        if PACKED:
            age = first.to(tl.int32) + step - tl.load(starts + step, mask=left > step, other=0)
        grad, seen_1, seen_2, seen_3, grad_1, grad_2, grad_3 = step_back(
            grad, x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED=PACKED, SILU=SILU
        )
        share, share_1, share_2, share_3, share_bias = with_shares(
            share, share_1, share_2, share_3, share_bias, grad, x_0, seen_1, seen_2, seen_3, NEEDS_WEIGHT=NEEDS_WEIGHT
        )
        if NEEDS_INITIAL:
            place = grad_initial + (ahead + step) * num_channels + channel
            reaches = (ahead + step >= 0) & (ahead + step < TAPS - 1)
            tl.store(place, narrow(back_3 + grad_3, grad_initial.dtype.element_ty), mask=only_if(reaches, channel, num_channels))
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = grad * now
        x_3 = x_2
        x_2 = x_1
        x_1 = x_0
    read_x += 3 * x_stride
    read_grad += 3 * grad_stride
    for step in tl.range(3, steps, loop_unroll_factor=UNROLLED):
        x_0 = widen(tl.load(read_x, mask=inside))
        grad = widen(tl.load(read_grad, mask=inside))
        age = POSITIONS
        if PACKED:
            age = first.to(tl.int32) + step - tl.load(starts + step)
        grad, seen_1, seen_2, seen_3, grad_1, grad_2, grad_3 = step_back(
            grad, x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED=PACKED, SILU=SILU
        )
        share, share_1, share_2, share_3, share_bias = with_shares(
            share, share_1, share_2, share_3, share_bias, grad, x_0, seen_1, seen_2, seen_3, NEEDS_WEIGHT=NEEDS_WEIGHT
        )
        if NEEDS_X:
            tl.store(written, narrow(back_3 + grad_3, grad_x.dtype.element_ty), mask=inside)
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = grad * now
        x_3 = x_2
        x_2 = x_1
        x_1 = x_0
        read_x += x_stride
        read_grad += grad_stride
        written += num_channels
    if NEEDS_X:
        stop = tl.maximum(steps, 3)
        for more in tl.static_range(3):
            here = only_if(stop + more < left, channel, num_channels)
            x_0 = widen(tl.load(read_x + more * x_stride, mask=here, other=0.0))
            grad = widen(tl.load(read_grad + more * grad_stride, mask=here, other=0.0))
            age = POSITIONS
            if PACKED:
                age = first.to(tl.int32) + stop + more - tl.load(starts + stop + more, mask=stop + more < left, other=0)
            grad, seen_1, seen_2, seen_3, grad_1, grad_2, grad_3 = step_back(
                grad, x_0, x_1, x_2, x_3, offset, now, tap_1, tap_2, tap_3, age, PACKED=PACKED, SILU=SILU
            )
            place = written + more * num_channels
            tl.store(place, narrow(back_3 + grad_3, grad_x.dtype.element_ty), mask=only_if(stop + more < steps + 3, channel, num_channels))
            back_3 = back_2 + grad_2
            back_2 = back_1 + grad_1
            back_1 = grad * now
            x_3 = x_2
            x_2 = x_1
            x_1 = x_0
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
    return {"POSITIONS": CONV_FORWARD_POSITIONS, "CHANNELS": min(CONV_FORWARD_CHANNELS, block_of(num_channels, 32)), "num_warps": 1}


def backward_options(num_channels: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile and warps of the backward: a thread loads 16 bytes, eight channels or, of fp32, four."""
    channels = CONV_BACKWARD_BYTES // dtype.itemsize
    return {"POSITIONS": CONV_BACKWARD_POSITIONS, "CHANNELS": min(channels, block_of(num_channels, 32)), "num_warps": 1}


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
                x, weight.contiguous(), _or(bias, x), _or(starts, x), _or(initial, x), y,
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
                grad_y, x, weight.contiguous(), _or(bias, x), _or(starts, x), _or(initial, x), _or(grad_x, x), _or(grad_initial, x),
                partial,
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


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """`tensor`, or a placeholder that the kernel does not read."""
    return other if tensor is None else tensor.contiguous()


def _dense(share: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, because a view would keep all shares alive."""
    return share.to(dtype, copy=True, memory_format=torch.contiguous_format)
