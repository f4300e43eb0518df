"""The forward kernel: a program walks over its positions with the last three products of its channels in registers."""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow
from megakernels._common.walks import UNROLLED, of_document, taps_of, walk_of
from megakernels.ops.gated_conv1d.kernel_taps import convolved, products_before, rounded_product


@triton.jit  # type: ignore[untyped-decorator]
def gated_conv_forward_kernel(  # type: ignore[no-untyped-def]
    input_gate, output_gate, value, before, weight, bias, starts, y,
    input_row, input_stride, output_row, output_stride, value_row, value_stride,
    num_pieces, num_positions, num_channels,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):  # fmt: skip
    """POSITIONS positions of CHANNELS channels of one piece of y."""
    row, first, steps, channel, inside = walk_of(num_positions, num_channels, POSITIONS=POSITIONS, CHANNELS=CHANNELS)
    begin = row % num_pieces * num_positions
    input_gate += row // num_pieces * input_row + begin * input_stride
    output_gate += row // num_pieces * output_row + begin * output_stride
    value += row // num_pieces * value_row + begin * value_stride
    before += row * (TAPS - 1) * num_channels
    now, tap_1, tap_2, tap_3 = taps_of(weight, channel, inside, TAPS=TAPS)
    offset = tl.zeros([CHANNELS], dtype=tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    u_1, u_2, u_3 = products_before(
        input_gate, value, before, first, input_stride, value_stride, channel, num_channels, TAPS=TAPS, HAS_BEFORE=HAS_BEFORE
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
            seen_1, seen_2, seen_3 = of_document(age, u_1, u_2, u_3)
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
