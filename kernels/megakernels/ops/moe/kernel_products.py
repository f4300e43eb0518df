"""Triton kernels of routed experts: grouped products that gather tokens while reading, and write results by token and slot.

Rows are the (token, slot) pairs sorted by expert, split into tiles of one expert each; the expert of a tile is found
from running sums on the device. The grid has the maximum number of tiles, and programs without a tile exit immediately. Products that sum
over rows, the matrices' gradients, read copies in the rows' order: there the index of each row would have to be read in every step. Biases
are added where a product is still in fp32.
"""

import triton
import triton.language as tl

from megakernels._common.tiles import dot, narrow, sigmoid
from megakernels.ops.activation.kernel import activated, slopes
from megakernels.ops.activation.reference import CLAMPED_SLOPE
from megakernels.ops.moe.kernel_plan import group_of

CLAMPED = 4
"""The kind of the clamped swiglu, none of `activation.kernel.KINDS`."""
SLOPE = tl.constexpr(CLAMPED_SLOPE)


@triton.jit
def held_within(gate, up, limit):  # type: ignore[no-untyped-def]
    """The gate up to the limit, and up within ± limit; NaN stays NaN."""
    held = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    inner = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return held, tl.minimum(inner, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def hidden_of(gate, up, limit, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """`activated` of fp32 tiles, or the clamped swiglu."""
    if KIND == 4:
        held, inner = held_within(gate, up, limit)
        found = held * sigmoid(held * SLOPE) * (inner + 1.0)
    else:
        found = activated(gate, up, KIND)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def slopes_of(gate, up, limit, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Derivatives of `hidden_of` by gate and by up: zero where they are clamped."""
    if KIND == 4:
        held, inner = held_within(gate, up, limit)
        share = sigmoid(held * SLOPE)
        by_gate = tl.where(gate > limit, 0.0, (inner + 1.0) * share * (1.0 + held * SLOPE * (1.0 - share)))
        by_up = tl.where(tl.abs(up) > limit, 0.0, held * share)
    else:
        by_gate, by_up = slopes(gate, up, KIND)
    return by_gate, by_up


@triton.jit
def bias_of(bias, expert, col, num_cols):  # type: ignore[no-untyped-def]
    """A row of an expert's biases."""
    return tl.load(bias + expert.to(tl.int64) * num_cols + col, mask=col < num_cols, other=0.0).to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def products(  # type: ignore[no-untyped-def]
    a, b, other_b, a_row, matrix, col, inner, num_cols, there,
    TURNED: tl.constexpr, TWO: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows of a, given by their offsets, times one matrix of b, and of other_b if TWO: fp32 [TILE, COLS] each; else the first twice.

    A matrix is [inner, num_cols], or its transpose if TURNED.
    """
    step = tl.arange(0, STEP)
    left = a + a_row[:, None] + step[None, :]
    place = matrix + step[:, None].to(tl.int64) * (1 if TURNED else num_cols) + col[None, :].to(tl.int64) * (inner if TURNED else 1)
    inside = col < num_cols
    total = tl.zeros([TILE, COLS], dtype=tl.float32)
    other = total
    for first in range(0, inner, STEP):
        rest = inner - first
        x = tl.load(left, mask=there[:, None] & (step < rest)[None, :], other=0.0)
        y = tl.load(b + place, mask=(step < rest)[:, None] & inside[None, :], other=0.0)
        total += dot(x, y)
        if TWO:
            z = tl.load(other_b + place, mask=(step < rest)[:, None] & inside[None, :], other=0.0)
            other += dot(x, z)
        left += STEP
        place += STEP if TURNED else tl.cast(num_cols, tl.int64) * STEP
    return total, other if TWO else total


@triton.jit  # type: ignore[untyped-decorator]
def block_products(  # type: ignore[no-untyped-def]
    a, b, other_b, total, a_row, first_row, expert, first_col, inner, num_cols, there,
    DENSE: tl.constexpr, TURNED: tl.constexpr, TWO: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`products`, added to a total, of matrices that descriptors read, and of rows of a from first_row on if DENSE; STEP divides `inner`.

    Rows and columns beyond an expert's belong to the next expert: the caller does not store them.
    """
    other = tl.zeros([TILE, COLS], dtype=tl.float32)
    left = None if DENSE else a + a_row[:, None] + tl.arange(0, STEP)[None, :]
    matrix = expert * (num_cols if TURNED else inner)
    for first in range(0, inner, STEP):
        if DENSE:
            x = a.load([first_row, first])
        else:
            x = tl.load(left, mask=there[:, None], other=0.0)
            left += STEP
        y = b.load([matrix + first_col, first]).T if TURNED else b.load([matrix + first, first_col])
        total += dot(x, y)
        if TWO:
            other += dot(x, other_b.load([matrix + first_col, first]).T)
    return total, other if TWO else total


@triton.jit  # type: ignore[untyped-decorator]
def halves(tile, TILE: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The left and the right columns of a tile; a thread keeps its elements."""
    return tl.split(tl.permute(tl.reshape(tile, (TILE, 2, COLS // 2)), (0, 2, 1)))


@triton.jit  # type: ignore[untyped-decorator]
def pairs_of(rows, first, stop, top_k, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of the tile from `first` on: their indices, a mask of valid rows, their (token, slot) pairs and their tokens."""
    near = tl.arange(0, TILE)
    there = first + near < stop
    pair = tl.load(rows + first.to(tl.int64) + near, mask=there, other=0)
    return near, there, pair, (pair // top_k).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(expert, inner, num_cols, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's columns of an expert's matrix, and the offset of the matrix."""
    return tl.program_id(0) * COLS + tl.arange(0, COLS), expert.to(tl.int64) * num_cols * inner


@triton.jit
def made_at(weights, near, there, pair, col, first, num_cols):  # type: ignore[no-untyped-def]
    """A tile of [M, num_cols]: mask of its elements, offset of its first row, offsets of its elements from there, and row weights."""
    mask = there[:, None] & (col < num_cols)[None, :]
    corner = first.to(tl.int64) * num_cols  # offsets within a tile fit into 32 bits
    place = near[:, None] * num_cols + col[None, :]
    return mask, corner, place, tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def up_end(  # type: ignore[no-untyped-def]
    gate_tile, up_tile, weights, gate_bias, up_bias, gate_out, up_out, hidden,
    expert, near, there, pair, first, first_col, num_cols, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores COLS columns of the first products, with their biases, and of their activation times the rows' weights."""
    col = first_col + tl.arange(0, COLS)
    if HAS_UP_BIAS:
        up_tile += bias_of(up_bias, expert, col, num_cols)
    if HAS_GATE_BIAS:
        gate_tile += bias_of(gate_bias, expert, col, num_cols)
    if not GATED:
        gate_tile = up_tile
    mask, corner, place, weight = made_at(weights, near, there, pair, col, first, num_cols)
    tl.store(up_out + corner + place, narrow(up_tile, up_out.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(gate_out + corner + place, narrow(gate_tile, gate_out.dtype.element_ty), mask=mask)
    found = hidden_of(gate_tile, up_tile, limit, KIND) * weight[:, None]
    tl.store(hidden + corner + place, narrow(found, hidden.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def up_kernel(  # type: ignore[no-untyped-def]
    x, gate, up, gate_bias, up_bias, weights, rows, ends, tile_ends, gate_out, up_out, hidden,
    x_stride,
    top_k, num_experts, inner, num_cols, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of x gateᵀ and x upᵀ, and of their activation times the rows' weights; x is read at the rows' tokens.

    With BLOCKS gate and up are descriptors, and the tile's halves end one after the other, which takes fewer registers.
    """
    expert, first, stop = group_of(tl.program_id(1), ends, tile_ends, num_experts, TILE, EXPERTS)
    if expert >= num_experts:
        return
    near, there, pair, token = pairs_of(rows, first, stop, top_k, TILE)
    token *= x_stride
    if BLOCKS:
        first_col = tl.program_id(0) * COLS
        up_tile, gate_tile = block_products(
            x, up, gate, tl.zeros([TILE, COLS], dtype=tl.float32), token, first, expert, first_col, inner, num_cols, there,
            False, True, GATED, TILE, COLS, STEP,
        )  # fmt: skip
        HALF: tl.constexpr = COLS // 2
        up_left, up_right = halves(up_tile, TILE, COLS)
        gate_left, gate_right = halves(gate_tile, TILE, COLS)
        up_end(
            gate_left, up_left, weights, gate_bias, up_bias, gate_out, up_out, hidden,
            expert, near, there, pair, first, first_col, num_cols, limit, KIND, GATED, HAS_GATE_BIAS, HAS_UP_BIAS, HALF,
        )  # fmt: skip
        up_end(
            gate_right, up_right, weights, gate_bias, up_bias, gate_out, up_out, hidden,
            expert, near, there, pair, first, first_col + HALF, num_cols, limit, KIND, GATED, HAS_GATE_BIAS, HAS_UP_BIAS, HALF,
        )  # fmt: skip
    else:
        col, matrix = tile_of(expert, inner, num_cols, COLS)
        up_tile, gate_tile = products(x, up, gate, token, matrix, col, inner, num_cols, there, True, GATED, TILE, COLS, STEP)
        up_end(
            gate_tile, up_tile, weights, gate_bias, up_bias, gate_out, up_out, hidden,
            expert, near, there, pair, first, tl.program_id(0) * COLS, num_cols, limit, KIND, GATED, HAS_GATE_BIAS, HAS_UP_BIAS, COLS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def down_kernel(  # type: ignore[no-untyped-def]
    a, b, other_a, other_b, bias, weights, rows, ends, tile_ends, out, num_experts, inner, num_cols,
    TURNED: tl.constexpr, PAIR: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of a b, of a b + other_a other_b, or of a b + weights · bias, for sorted rows; stored where their tokens and slots are.

    With BLOCKS all four are descriptors; matrices are transposed if TURNED.
    """
    expert, first, stop = group_of(tl.program_id(1), ends, tile_ends, num_experts, TILE, EXPERTS)
    if expert >= num_experts:
        return
    row = first.to(tl.int64) + tl.arange(0, TILE)
    there = row < stop
    col, matrix = tile_of(expert, inner, num_cols, COLS)
    a_row = row * inner
    if BLOCKS:
        first_col = tl.program_id(0) * COLS
        total = tl.zeros([TILE, COLS], dtype=tl.float32)
        total, _ = block_products(
            a, b, b, total, a_row, first, expert, first_col, inner, num_cols, there, True, TURNED, False, TILE, COLS, STEP
        )
        if PAIR:
            total, _ = block_products(
                other_a, other_b, b, total, a_row, first, expert, first_col, inner, num_cols, there, True, TURNED, False, TILE, COLS, STEP
            )
    else:
        total, _ = products(a, b, b, a_row, matrix, col, inner, num_cols, there, TURNED, False, TILE, COLS, STEP)
        if PAIR:
            more, _ = products(other_a, other_b, b, a_row, matrix, col, inner, num_cols, there, TURNED, False, TILE, COLS, STEP)
            total += more
    pair = tl.load(rows + row, mask=there, other=0)
    if HAS_BIAS:
        total += tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)[:, None] * bias_of(bias, expert, col, num_cols)
    place = pair.to(tl.int64) * num_cols
    mask = there[:, None] & (col < num_cols)[None, :]
    tl.store(out + place[:, None] + col[None, :], narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def pull_end(  # type: ignore[no-untyped-def]
    pulled, weights, gate_out, up_out, grad_gate_out, grad_up_out, hidden, share,
    near, there, pair, first, first_col, num_cols, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores COLS columns of the gradients of gate_out and up_out and of the hidden rows, and their share of the weights' gradient."""
    col = first_col + tl.arange(0, COLS)
    mask, corner, place, weight = made_at(weights, near, there, pair, col, first, num_cols)
    up = tl.load(up_out + corner + place, mask=mask, other=0.0).to(tl.float32)
    gate = up
    if GATED:
        gate = tl.load(gate_out + corner + place, mask=mask, other=0.0).to(tl.float32)
    acted = hidden_of(gate, up, limit, KIND)
    tl.store(share + pair, tl.sum(tl.where(mask, pulled * acted, 0.0), 1), mask=there & (near * 0 + first_col < num_cols))
    if KIND == 4:  # the kernel with clamping spills registers if this is the last statement, the others if it is not
        tl.store(hidden + corner + place, narrow(acted * weight[:, None], hidden.dtype.element_ty), mask=mask)
    by_gate, by_up = slopes_of(gate, up, limit, KIND)
    pulled *= weight[:, None]
    if GATED:
        tl.store(grad_gate_out + corner + place, narrow(pulled * by_gate, grad_gate_out.dtype.element_ty), mask=mask)
    tl.store(grad_up_out + corner + place, narrow(pulled * by_up, grad_up_out.dtype.element_ty), mask=mask)
    if KIND != 4:
        tl.store(hidden + corner + place, narrow(acted * weight[:, None], hidden.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def pull_kernel(  # type: ignore[no-untyped-def]
    grad_y, down, weights, rows, ends, tile_ends, gate_out, up_out, grad_gate_out, grad_up_out, hidden, grad_weights,
    grad_stride,
    top_k, num_experts, num_pairs, inner, num_cols, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr,
    TILE: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of grad_y down, the gradients of gate_out and up_out, the weighted hidden rows, and shares of the weights' gradient.

    With BLOCKS down is a descriptor, and the tile's halves end one after the other, with a share each.
    """
    expert, first, stop = group_of(tl.program_id(1), ends, tile_ends, num_experts, TILE, EXPERTS)
    if expert >= num_experts:
        return
    near, there, pair, token = pairs_of(rows, first, stop, top_k, TILE)
    token *= grad_stride
    if BLOCKS:
        first_col = tl.program_id(0) * COLS
        pulled, _ = block_products(
            grad_y, down, down, tl.zeros([TILE, COLS], dtype=tl.float32), token, first, expert, first_col, inner, num_cols, there,
            False, False, False, TILE, COLS, STEP,
        )  # fmt: skip
        HALF: tl.constexpr = COLS // 2
        left, right = halves(pulled, TILE, COLS)
        share = grad_weights + tl.program_id(0).to(tl.int64) * 2 * num_pairs
        pull_end(
            left, weights, gate_out, up_out, grad_gate_out, grad_up_out, hidden, share,
            near, there, pair, first, first_col, num_cols, limit, KIND, GATED, HALF,
        )  # fmt: skip
        pull_end(
            right, weights, gate_out, up_out, grad_gate_out, grad_up_out, hidden, share + num_pairs,
            near, there, pair, first, first_col + HALF, num_cols, limit, KIND, GATED, HALF,
        )  # fmt: skip
    else:
        col, matrix = tile_of(expert, inner, num_cols, COLS)
        pulled, _ = products(grad_y, down, down, token, matrix, col, inner, num_cols, there, False, False, TILE, COLS, STEP)
        share = grad_weights + tl.program_id(0).to(tl.int64) * num_pairs
        pull_end(
            pulled, weights, gate_out, up_out, grad_gate_out, grad_up_out, hidden, share,
            near, there, pair, first, tl.program_id(0) * COLS, num_cols, limit, KIND, GATED, COLS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def outer_kernel(  # type: ignore[no-untyped-def]
    a_blocks, b_blocks, a, b, ends, out,
    a_stride, b_stride,
    num_across, num_cols,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's Σ a ⊗ b over its rows: whole blocks of rows by descriptors if BLOCKS. Zero for an expert without rows."""
    expert = tl.program_id(2).to(tl.int64)
    across = tl.program_id(1) * TILE + tl.arange(0, TILE)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    step = tl.arange(0, STEP).to(tl.int64)
    total = tl.zeros([TILE, COLS], dtype=tl.float32)
    whole = start
    if BLOCKS:
        whole = start + (stop - start) // STEP * STEP
        for first in tl.range(start, whole, STEP):
            left = a_blocks.load([first, tl.program_id(1) * TILE])
            total += dot(tl.trans(left), b_blocks.load([first, tl.program_id(0) * COLS]))
    for first in tl.range(whole, stop, STEP, num_stages=1 if BLOCKS else None):  # with blocks only the last rows, otherwise all
        row = first + step
        there = row < stop
        left = tl.load(a + row[:, None] * a_stride + across[None, :], mask=there[:, None] & (across < num_across)[None, :], other=0.0)
        right = tl.load(b + row[:, None] * b_stride + col[None, :], mask=there[:, None] & (col < num_cols)[None, :], other=0.0)
        total += dot(tl.trans(left), right)
    place = expert * num_across * num_cols + across[:, None].to(tl.int64) * num_cols + col[None, :]
    tl.store(out + place, narrow(total, out.dtype.element_ty), mask=(across < num_across)[:, None] & (col < num_cols)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def bias_kernel(grad, ends, out, grad_stride, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """COLS columns of the sum of one expert's rows of grad; zero without rows."""
    expert = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    near = tl.arange(0, ROWS).to(tl.int64)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for first in range(start, stop, ROWS):
        row = first + near
        mask = (row < stop)[:, None] & (col < num_cols)[None, :]
        total += tl.load(grad + row[:, None] * grad_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + expert * num_cols + col, narrow(tl.sum(total, 0), out.dtype.element_ty), mask=col < num_cols)


@triton.jit  # type: ignore[untyped-decorator]
def down_bias_kernel(  # type: ignore[no-untyped-def]
    grad_y, bias, weights, rows, ends, out, grad_weights,
    grad_stride,
    top_k, num_pairs, num_cols,
    NEEDS_BIAS: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """COLS columns of one expert's sum of weighted rows of grad_y, read at their tokens, and of each row's product with the bias."""
    expert = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    near = tl.arange(0, ROWS).to(tl.int64)
    value = bias_of(bias, expert, col, num_cols)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for first in range(start, stop, ROWS):
        row = first + near
        there = row < stop
        pair = tl.load(rows + row, mask=there, other=0)
        place = (pair // top_k).to(tl.int64)[:, None] * grad_stride + col[None, :]
        grad = tl.load(grad_y + place, mask=there[:, None] & (col < num_cols)[None, :], other=0.0).to(tl.float32)
        if NEEDS_WEIGHTS:
            tl.store(grad_weights + tl.program_id(0).to(tl.int64) * num_pairs + pair, tl.sum(grad * value, 1), mask=there)
        if NEEDS_BIAS:
            total += grad * tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)[:, None]
    if NEEDS_BIAS:
        place = out + expert.to(tl.int64) * num_cols + col
        tl.store(place, narrow(tl.sum(total, 0), out.dtype.element_ty), mask=col < num_cols)
