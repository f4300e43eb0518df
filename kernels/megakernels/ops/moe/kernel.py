"""Triton kernels of routed experts: grouped products that gather tokens while reading, and write results by token and slot.

Rows are the (token, slot) pairs sorted by expert, split into tiles of one expert each; the expert of a tile is found
from running sums on the device. The grid has the maximum number of tiles, and programs without a tile exit immediately. No permuted copy
of tokens is made, forward or backward.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.blocks import SMALLEST_DOT, block_of
from megakernels._common.tiles import dot, narrow, on_device_of, unit_stride
from megakernels.ops.activation.kernel import KINDS, activated, slopes
from megakernels.ops.moe.inputs import Experts, Made
from megakernels.ops.moe.kernel_plan import Tiles, group_of, sum_slots, tiles_of
from megakernels.ops.moe.sizes import PULL_COLS, outer_options, product_options

UP_COLS = {"swiglu": 64, "relu2": 128, "gelu": 64}
"""Columns of a bf16 tile of the forward's first product; swiglu has two such tiles."""


@triton.jit  # type: ignore[untyped-decorator]
def products(  # type: ignore[no-untyped-def]
    a,
    b,
    other_b,
    a_row,
    matrix,
    col,
    inner,
    num_cols,
    there,
    b_inner_stride,
    b_col_stride,
    TWO: tl.constexpr,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows of a, given by their offsets, times one matrix of b, and of other_b if TWO: fp32 [TILE, COLS] each; else the first twice."""
    step = tl.arange(0, STEP)
    left = a + a_row[:, None] + step[None, :]
    place = matrix + step[:, None].to(tl.int64) * b_inner_stride + col[None, :].to(tl.int64) * b_col_stride
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
        place += tl.cast(b_inner_stride, tl.int64) * STEP
    return total, other if TWO else total


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
    """Of a tile of [M, num_cols]: which elements exist, where its first row begins, its elements' places from there, and row weights."""
    mask = there[:, None] & (col < num_cols)[None, :]
    corner = first.to(tl.int64) * num_cols  # from a tile's first element on, 32 bits reach
    place = near[:, None] * num_cols + col[None, :]
    return mask, corner, place, tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def up_kernel(  # type: ignore[no-untyped-def]
    x,
    gate,
    up,
    weights,
    rows,
    ends,
    tile_ends,
    gate_out,
    up_out,
    hidden,
    x_stride,
    top_k,
    num_experts,
    inner,
    num_cols,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A tile of x gateᵀ and x upᵀ, and of their activation times the rows' weights; x is read at the rows' tokens."""
    expert, first, stop = group_of(tl.program_id(1), ends, tile_ends, num_experts, TILE, EXPERTS)
    if expert >= num_experts:
        return
    near, there, pair, token = pairs_of(rows, first, stop, top_k, TILE)
    token *= x_stride
    col, matrix = tile_of(expert, inner, num_cols, COLS)
    up_tile, gate_tile = products(x, up, gate, token, matrix, col, inner, num_cols, there, 1, inner, KIND == 0, TILE, COLS, STEP)
    mask, corner, place, weight = made_at(weights, near, there, pair, col, first, num_cols)
    tl.store(up_out + corner + place, narrow(up_tile, up_out.dtype.element_ty), mask=mask)
    if KIND == 0:
        tl.store(gate_out + corner + place, narrow(gate_tile, gate_out.dtype.element_ty), mask=mask)
    found = activated(gate_tile, up_tile, KIND) * weight[:, None]
    tl.store(hidden + corner + place, narrow(found, hidden.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def down_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    other_a,
    other_b,
    rows,
    ends,
    tile_ends,
    out,
    num_experts,
    inner,
    num_cols,
    b_inner_stride,
    b_col_stride,
    PAIR: tl.constexpr,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A tile of a b, or of a b + other_a other_b, for sorted rows; stored where the rows' tokens and slots are."""
    expert, first, stop = group_of(tl.program_id(1), ends, tile_ends, num_experts, TILE, EXPERTS)
    if expert >= num_experts:
        return
    row = first.to(tl.int64) + tl.arange(0, TILE)
    there = row < stop
    col, matrix = tile_of(expert, inner, num_cols, COLS)
    a_row = row * inner
    total, _ = products(a, b, b, a_row, matrix, col, inner, num_cols, there, b_inner_stride, b_col_stride, False, TILE, COLS, STEP)
    if PAIR:
        more, _ = products(
            other_a, other_b, b, a_row, matrix, col, inner, num_cols, there, b_inner_stride, b_col_stride, False, TILE, COLS, STEP
        )
        total += more
    place = tl.load(rows + row, mask=there, other=0).to(tl.int64) * num_cols
    mask = there[:, None] & (col < num_cols)[None, :]
    tl.store(out + place[:, None] + col[None, :], narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def pull_kernel(  # type: ignore[no-untyped-def]
    grad_y,
    down,
    weights,
    rows,
    ends,
    tile_ends,
    gate_out,
    up_out,
    grad_gate_out,
    grad_up_out,
    hidden,
    grad_weights,
    grad_stride,
    top_k,
    num_experts,
    num_pairs,
    inner,
    num_cols,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A tile of grad_y down, the gradients of gate_out and up_out, the weighted hidden rows, and shares of the weights' gradient."""
    expert, first, stop = group_of(tl.program_id(1), ends, tile_ends, num_experts, TILE, EXPERTS)
    if expert >= num_experts:
        return
    near, there, pair, token = pairs_of(rows, first, stop, top_k, TILE)
    token *= grad_stride
    col, matrix = tile_of(expert, inner, num_cols, COLS)
    pulled, _ = products(grad_y, down, down, token, matrix, col, inner, num_cols, there, num_cols, 1, False, TILE, COLS, STEP)
    mask, corner, place, weight = made_at(weights, near, there, pair, col, first, num_cols)
    up = tl.load(up_out + corner + place, mask=mask, other=0.0).to(tl.float32)
    gate = up
    if KIND == 0:
        gate = tl.load(gate_out + corner + place, mask=mask, other=0.0).to(tl.float32)
    share = grad_weights + tl.program_id(0).to(tl.int64) * num_pairs + pair
    acted = activated(gate, up, KIND)
    tl.store(share, tl.sum(pulled * acted, 1), mask=there)
    by_gate, by_up = slopes(gate, up, KIND)
    pulled *= weight[:, None]
    if KIND == 0:
        tl.store(grad_gate_out + corner + place, narrow(pulled * by_gate, grad_gate_out.dtype.element_ty), mask=mask)
    tl.store(grad_up_out + corner + place, narrow(pulled * by_up, grad_up_out.dtype.element_ty), mask=mask)
    tl.store(hidden + corner + place, narrow(acted * weight[:, None], hidden.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def outer_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    rows,
    ends,
    out,
    a_stride,
    b_stride,
    top_k,
    num_across,
    num_cols,
    GATHERS_A: tl.constexpr,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
):
    """A tile of one expert's Σ a ⊗ b over its rows; a, or else b, is read at the rows' tokens. Zero for an expert without rows."""
    expert = tl.program_id(2).to(tl.int64)
    across = tl.program_id(1) * TILE + tl.arange(0, TILE)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    step = tl.arange(0, STEP).to(tl.int64)
    total = tl.zeros([TILE, COLS], dtype=tl.float32)
    for first in range(start, stop, STEP):
        row = first + step
        there = row < stop
        token = (tl.load(rows + row, mask=there, other=0) // top_k).to(tl.int64)
        a_row = (token if GATHERS_A else row) * a_stride
        b_row = (row if GATHERS_A else token) * b_stride
        left = tl.load(a + a_row[None, :] + across[:, None], mask=there[None, :] & (across < num_across)[:, None], other=0.0)
        right = tl.load(b + b_row[:, None] + col[None, :], mask=there[:, None] & (col < num_cols)[None, :], other=0.0)
        total += dot(left, right)
    place = expert * num_across * num_cols + across[:, None].to(tl.int64) * num_cols + col[None, :]
    tl.store(out + place, narrow(total, out.dtype.element_ty), mask=(across < num_across)[:, None] & (col < num_cols)[None, :])


def routed_experts_forward(given: Experts) -> Made:
    """Same contract as `reference.routed_experts_forward`, for fp32, bf16 and fp16."""
    x, weights, rows, counts, gate, up, down = given[:7]
    activation = given.activation
    x, weights, up, down = unit_stride(x), weights.contiguous(), up.contiguous(), down.contiguous()
    (num_pairs,), (num_experts, width, num_hidden), top_k = rows.shape, up.shape, weights.shape[1]
    tiles = tiles_of(counts, num_pairs, x.element_size())
    made = (num_pairs, width)
    up_out, hidden = (torch.empty(made, dtype=x.dtype, device=x.device) for _ in range(2))
    gate_out = None if gate is None else torch.empty(made, dtype=x.dtype, device=x.device)
    out = torch.empty(num_pairs, num_hidden, dtype=x.dtype, device=x.device)
    experts = block_of(num_experts)
    if num_pairs:
        with on_device_of(x):
            options = product_options(width, x.element_size(), UP_COLS[activation])
            up_kernel[(triton.cdiv(width, options["COLS"]), tiles.most)](
                x,
                up if gate is None else gate.contiguous(),
                up,
                weights,
                rows,
                tiles.ends,
                tiles.tile_ends,
                up_out if gate_out is None else gate_out,
                up_out,
                hidden,
                x.stride(0),
                top_k,
                num_experts,
                num_hidden,
                width,
                KIND=KINDS[activation],
                TILE=tiles.rows,
                EXPERTS=experts,
                **options,
            )
        _times(tiles, rows, hidden, down, None, None, out, transposed=True)
    del hidden
    return out if top_k == 1 else sum_slots(out, top_k), gate_out, up_out


def routed_experts_backward(
    grad_y: Tensor, given: Experts, gate_out: Tensor | None, up_out: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Same contract as `reference.routed_experts_backward`."""
    x, weights, rows, counts, gate, up, down = given[:7]
    activation = given.activation
    grad_y, x, weights, up, down = unit_stride(grad_y), unit_stride(x), weights.contiguous(), up.contiguous(), down.contiguous()
    (num_pairs, width), (num_experts, _, num_hidden), top_k = up_out.shape, up.shape, weights.shape[1]
    tiles = tiles_of(counts, num_pairs, x.element_size())
    options = product_options(width, x.element_size(), largest=PULL_COLS)
    num_shares = triton.cdiv(width, options["COLS"])
    grad_up_out, hidden = torch.empty_like(up_out), torch.empty_like(up_out)
    grad_gate_out = None if gate_out is None else torch.empty_like(gate_out)
    shares = torch.empty(num_shares, num_pairs, dtype=torch.float32, device=x.device)
    if num_pairs:
        with on_device_of(x):
            pull_kernel[(num_shares, tiles.most)](
                grad_y,
                down,
                weights,
                rows,
                tiles.ends,
                tiles.tile_ends,
                up_out if gate_out is None else gate_out,
                up_out,
                grad_up_out if grad_gate_out is None else grad_gate_out,
                grad_up_out,
                hidden,
                shares,
                grad_y.stride(0),
                top_k,
                num_experts,
                num_pairs,
                num_hidden,
                width,
                KIND=KINDS[activation],
                TILE=tiles.rows,
                EXPERTS=block_of(num_experts),
                **options,
            )
    grad_weights = shares.sum(0).view(weights.shape) if needs[1] else None
    del shares
    grad_x = grad_gate = grad_up = grad_down = None
    if needs[0]:
        grad_x = torch.empty(num_pairs, num_hidden, dtype=x.dtype, device=x.device)
        other = None if gate is None else gate.contiguous()
        _times(tiles, rows, grad_up_out, up, grad_gate_out, other, grad_x, transposed=False)
        grad_x = grad_x if top_k == 1 else sum_slots(grad_x, top_k)
    if needs[4]:  # free each product's operand before the next result is allocated
        grad_down = _outer(tiles, rows, top_k, grad_y, hidden, gathers_a=True)
    del hidden
    if needs[2] and grad_gate_out is not None:
        grad_gate = _outer(tiles, rows, top_k, grad_gate_out, x, gathers_a=False)
    del grad_gate_out
    if needs[3]:
        grad_up = _outer(tiles, rows, top_k, grad_up_out, x, gathers_a=False)
    return grad_x, grad_weights, grad_gate, grad_up, grad_down


def _times(
    tiles: Tiles, rows: Tensor, a: Tensor, b: Tensor, other_a: Tensor | None, other_b: Tensor | None, out: Tensor, *, transposed: bool
) -> None:
    """Sorted rows a [M, i] times b [E, i, c] (transposed: [E, c, i]), plus the other product, into out [M, c] by token and slot."""
    inner, num_cols = a.shape[1], out.shape[1]
    options = product_options(num_cols, a.element_size())
    if a.shape[0]:
        with on_device_of(a):
            down_kernel[(triton.cdiv(num_cols, options["COLS"]), tiles.most)](
                a,
                b,
                a if other_a is None else other_a,
                b if other_b is None else other_b,
                rows,
                tiles.ends,
                tiles.tile_ends,
                out,
                b.shape[0],
                inner,
                num_cols,
                1 if transposed else num_cols,
                inner if transposed else 1,
                PAIR=other_a is not None,
                TILE=tiles.rows,
                EXPERTS=block_of(b.shape[0]),
                **options,
            )


def _outer(tiles: Tiles, rows: Tensor, top_k: int, a: Tensor, b: Tensor, *, gathers_a: bool) -> Tensor:
    """Σ over each expert's rows of a ⊗ b: [E, a's width, b's width]."""
    num_experts, num_across, num_cols = tiles.ends.shape[0], a.shape[1], b.shape[1]
    out = torch.empty(num_experts, num_across, num_cols, dtype=a.dtype, device=a.device)
    options = outer_options(num_cols, a.element_size())
    tile = outer_rows(num_across, a.element_size())
    with on_device_of(a):
        outer_kernel[(triton.cdiv(num_cols, options["COLS"]), triton.cdiv(num_across, tile), num_experts)](
            a, b, rows, tiles.ends, out, a.stride(0), b.stride(0), top_k, num_across, num_cols, GATHERS_A=gathers_a, TILE=tile, **options
        )
    return out


def outer_rows(num_across: int, element_bytes: int) -> int:
    """Rows of a tile of the matrices' gradients."""
    return min(256 // element_bytes, block_of(num_across, SMALLEST_DOT))
