"""The backward kernel: one walk over positions makes the gradients of the gates, the value, the products before, and of the taps.

The gradient of a product is complete after the last tap that reads it, TAPS − 1 positions later: until then its parts and its two
factors are in registers.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import narrow
from megakernels._common.walks import UNROLLED, of_document, only_if, taps_of, walk_of
from megakernels.ops.gated_conv1d.kernel_taps import convolved, oldest, products_before, rounded_product


@triton.jit  # type: ignore[untyped-decorator]
def store_finished(  # type: ignore[no-untyped-def]
    grad_input, grad_value, grad_before, place, step, ahead, whole, gate, factor, channel, num_channels,
    TAPS: tl.constexpr, HAS_BEFORE: tl.constexpr, NEEDS_INPUT: tl.constexpr, NEEDS_VALUE: tl.constexpr,
):  # fmt: skip
    """The gradient `whole` of the product TAPS − 1 steps ago: of its factors, or of one of `before` in the first `ahead` steps."""
    finished = only_if(step >= TAPS - 1, channel, num_channels)
    late = place - (TAPS - 1) * num_channels
    if NEEDS_INPUT:
        tl.store(grad_input + late, narrow(whole * factor, grad_input.dtype.element_ty), mask=finished)
    if NEEDS_VALUE:
        tl.store(grad_value + late, narrow(whole * gate, grad_value.dtype.element_ty), mask=finished)
    if HAS_BEFORE:
        reaches = only_if(step < ahead, channel, num_channels)
        tl.store(grad_before + step * num_channels + channel, narrow(whole, grad_before.dtype.element_ty), mask=reaches)


@triton.jit  # type: ignore[untyped-decorator]
def gated_conv_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915  a step's values stay in registers
    grad_y, input_gate, output_gate, value, before, weight, bias, starts, grad_input, grad_output, grad_value, grad_before, partial,
    grad_row, grad_stride, input_row, input_stride, output_row, output_stride, value_row, value_stride,
    num_pieces, num_positions, num_channels,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr, NEEDS_INPUT: tl.constexpr, NEEDS_OUTPUT: tl.constexpr, NEEDS_VALUE: tl.constexpr, NEEDS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The gradients of POSITIONS positions of CHANNELS channels of one piece, and their share [TAPS + 1, C] of the weight gradient."""
    row, first, steps, channel, inside = walk_of(num_positions, num_channels, POSITIONS=POSITIONS, CHANNELS=CHANNELS)
    begin = row % num_pieces * num_positions
    grad_y += row // num_pieces * grad_row + begin * grad_stride
    input_gate += row // num_pieces * input_row + begin * input_stride
    output_gate += row // num_pieces * output_row + begin * output_stride
    value += row // num_pieces * value_row + begin * value_stride
    before += row * (TAPS - 1) * num_channels
    grad_before += row * (TAPS - 1) * num_channels
    now, tap_1, tap_2, tap_3 = taps_of(weight, channel, inside, TAPS=TAPS)
    offset = tl.zeros([CHANNELS], dtype=tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    u_1, u_2, u_3 = products_before(
        input_gate, value, before, first, input_stride, value_stride, channel, num_channels, TAPS=TAPS, HAS_BEFORE=HAS_BEFORE
    )
    # Separate zeros per factor of the tile's earlier products: of variables that start as one value, the loop carries only renamed ones
    gate_1 = tl.zeros([CHANNELS], dtype=tl.float32)
    gate_2 = tl.zeros([CHANNELS], dtype=tl.float32)
    gate_3 = tl.zeros([CHANNELS], dtype=tl.float32)
    value_1 = tl.zeros([CHANNELS], dtype=tl.float32)
    value_2 = tl.zeros([CHANNELS], dtype=tl.float32)
    value_3 = tl.zeros([CHANNELS], dtype=tl.float32)
    none = tl.zeros([CHANNELS], dtype=tl.float32)
    back_1 = none  # partial gradient of the previous product, from later positions
    back_2 = none
    back_3 = none
    share = none
    share_1 = none
    share_2 = none
    share_3 = none
    share_bias = none
    read_grad = grad_y + first * grad_stride + channel
    read_input = input_gate + first * input_stride + channel
    read_output = output_gate + first * output_stride + channel
    read_value = value + first * value_stride + channel
    place = (row * num_positions + first) * num_channels + channel
    starts += row * num_positions + first
    ahead = tl.where(first == 0, TAPS - 1, 0)  # the first steps, whose oldest product is one of `before`
    for step in tl.range(0, steps, loop_unroll_factor=UNROLLED):
        grad = tl.load(read_grad, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(read_input, mask=inside, other=0.0).to(tl.float32)
        value_0 = tl.load(read_value, mask=inside, other=0.0).to(tl.float32)
        u_0 = rounded_product(gate, value_0, value.dtype.element_ty)
        inner = grad * tl.load(read_output, mask=inside, other=0.0).to(tl.float32)
        seen_1 = u_1
        seen_2 = u_2
        seen_3 = u_3
        grad_1 = inner * tap_1
        grad_2 = inner * tap_2
        grad_3 = inner * tap_3
        if PACKED:
            age = first + step - tl.load(starts + step)
            seen_1, seen_2, seen_3 = of_document(age, u_1, u_2, u_3)
            grad_1, grad_2, grad_3 = of_document(age, grad_1, grad_2, grad_3)
        if NEEDS_OUTPUT:
            total = convolved(offset, u_0, seen_1, seen_2, seen_3, now, tap_1, tap_2, tap_3, TAPS=TAPS)
            tl.store(grad_output + place, narrow(grad * total, grad_output.dtype.element_ty), mask=inside)
        if NEEDS_WEIGHT:
            share += inner * u_0
            share_1 += inner * seen_1
            share_2 += inner * seen_2
            share_3 += inner * seen_3
            share_bias += inner
        whole = oldest(inner * now, back_1 + grad_1, back_2 + grad_2, back_3 + grad_3, TAPS=TAPS)
        late_gate, late_value = oldest(gate, gate_1, gate_2, gate_3, TAPS=TAPS), oldest(value_0, value_1, value_2, value_3, TAPS=TAPS)
        store_finished(
            grad_input, grad_value, grad_before, place, step, ahead, whole, late_gate, late_value, channel, num_channels,
            TAPS=TAPS, HAS_BEFORE=HAS_BEFORE, NEEDS_INPUT=NEEDS_INPUT, NEEDS_VALUE=NEEDS_VALUE,
        )  # fmt: skip
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = inner * now
        u_3 = u_2
        u_2 = u_1
        u_1 = u_0
        gate_3 = gate_2
        gate_2 = gate_1
        gate_1 = gate
        value_3 = value_2
        value_2 = value_1
        value_1 = value_0
        read_grad += grad_stride
        read_input += input_stride
        read_output += output_stride
        read_value += value_stride
        place += num_channels
    for more in tl.static_range(TAPS - 1):  # positions of the next program whose gradients reach back to this one
        step = steps + more
        here = only_if(first + step < num_positions, channel, num_channels)
        inner = tl.load(read_grad, mask=here, other=0.0).to(tl.float32)
        inner *= tl.load(read_output, mask=here, other=0.0).to(tl.float32)
        grad_1 = inner * tap_1
        grad_2 = inner * tap_2
        grad_3 = inner * tap_3
        if PACKED:
            age = first + step - tl.load(starts + step, mask=first + step < num_positions, other=0)
            grad_1, grad_2, grad_3 = of_document(age, grad_1, grad_2, grad_3)
        whole = oldest(inner * now, back_1 + grad_1, back_2 + grad_2, back_3 + grad_3, TAPS=TAPS)
        late_gate, late_value = oldest(gate_1, gate_1, gate_2, gate_3, TAPS=TAPS), oldest(value_1, value_1, value_2, value_3, TAPS=TAPS)
        store_finished(
            grad_input, grad_value, grad_before, place, step, ahead, whole, late_gate, late_value, channel, num_channels,
            TAPS=TAPS, HAS_BEFORE=HAS_BEFORE, NEEDS_INPUT=NEEDS_INPUT, NEEDS_VALUE=NEEDS_VALUE,
        )  # fmt: skip
        back_3 = back_2 + grad_2
        back_2 = back_1 + grad_1
        back_1 = inner * now
        gate_3 = gate_2
        gate_2 = gate_1
        value_3 = value_2
        value_2 = value_1
        read_grad += grad_stride
        read_output += output_stride
        place += num_channels
    if NEEDS_WEIGHT:
        sums = partial + tl.program_id(0).to(tl.int64) * (TAPS + 1) * num_channels + channel
        if TAPS > 3:
            tl.store(sums + (TAPS - 4) * num_channels, share_3, mask=inside)
        if TAPS > 2:
            tl.store(sums + (TAPS - 3) * num_channels, share_2, mask=inside)
        if TAPS > 1:
            tl.store(sums + (TAPS - 2) * num_channels, share_1, mask=inside)
        tl.store(sums + (TAPS - 1) * num_channels, share, mask=inside)
        tl.store(sums + TAPS * num_channels, share_bias, mask=inside)
