"""The forward kernel: a program walks over its positions with the last three products of its channels in registers."""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow
from megakernels._common.walks import UNROLLED, tap
from megakernels.ops.gated_conv1d.kernel_taps import convolved, product_before, rounded_product


@triton.jit  # type: ignore[untyped-decorator]
def gated_conv_forward_kernel(  # type: ignore[no-untyped-def]
    input_gate, output_gate, value, before, weight, bias, starts, y, input_row,
    input_stride,
    output_row,
    output_stride,
    value_row,
    value_stride,
    num_pieces, num_positions, num_channels,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):  # fmt: skip
    """POSITIONS positions of CHANNELS channels of one piece of y."""
    tiles = tl.cdiv(num_positions, POSITIONS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * POSITIONS
    steps = tl.minimum(POSITIONS, num_positions - first).to(tl.int32)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < num_channels
    begin = row % num_pieces * num_positions
    input_gate += row // num_pieces * input_row + begin * input_stride
    output_gate += row // num_pieces * output_row + begin * output_stride
    value += row // num_pieces * value_row + begin * value_stride
    before += row * (TAPS - 1) * num_channels
    now = tap(weight, channel, inside, DELAY=0, TAPS=TAPS)
    tap_1 = tap(weight, channel, inside, DELAY=1, TAPS=TAPS)
    tap_2 = tap(weight, channel, inside, DELAY=2, TAPS=TAPS)
    tap_3 = tap(weight, channel, inside, DELAY=3, TAPS=TAPS)
    offset = tl.zeros([CHANNELS], dtype=tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    u_1 = product_before(
        input_gate, value, before, first - 1, input_stride, value_stride, channel, num_channels, TAPS=TAPS, HAS_BEFORE=HAS_BEFORE
    )
    u_2 = product_before(
        input_gate, value, before, first - 2, input_stride, value_stride, channel, num_channels, TAPS=TAPS, HAS_BEFORE=HAS_BEFORE
    )
    u_3 = product_before(
        input_gate, value, before, first - 3, input_stride, value_stride, channel, num_channels, TAPS=TAPS, HAS_BEFORE=HAS_BEFORE
    )
    read_input = input_gate + first * input_stride + channel
    read_output = output_gate + first * output_stride + channel
    read_value = value + first * value_stride + channel
    written = y + (row * num_positions + first) * num_channels + channel
    starts += row * num_positions + first
    for step in tl.range(0, steps, loop_unroll_factor=UNROLLED):
        gate = tl.load(read_input, mask=inside, other=0.0).to(tl.float32)
        u_0 = rounded_product(gate, tl.load(read_value, mask=inside, other=0.0).to(tl.float32), value.dtype.element_ty)
        seen_1 = u_1
        seen_2 = u_2
        seen_3 = u_3
        if PACKED:
            age = first + step - tl.load(starts + step)
            seen_1 = tl.where(age >= 1, u_1, 0.0)
            seen_2 = tl.where(age >= 2, u_2, 0.0)
            seen_3 = tl.where(age >= 3, u_3, 0.0)
        total = convolved(offset, u_0, seen_1, seen_2, seen_3, now, tap_1, tap_2, tap_3, TAPS=TAPS)
        total *= tl.load(read_output, mask=inside, other=0.0).to(tl.float32)
        tl.store(written, narrow(total, y.dtype.element_ty), mask=inside)
        read_input += input_stride
        read_output += output_stride
        read_value += value_stride
        written += num_channels
        u_3 = u_2
        u_2 = u_1
        u_1 = u_0
