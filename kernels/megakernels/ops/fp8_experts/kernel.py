"""Triton kernels of the experts' copies in eight bits and of the operations between products; launches do not grow with experts.

- `fp8_group_kernel`: one program per some columns of one expert's rows: their largest magnitudes, and the rounded transpose. Rows may be
  read at their tokens.
- `fp8_hidden_kernel`: one program per tile: biases of the first products, activation, and the rows' weights.
- `fp8_pull_kernel`: one program per some rows: gradients through activation and weights, and the weights' own.
- `fp8_down_bias_kernel`: one program per tile: the weighted bias of `down`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import given_or, narrow, on_device_of, widen
from megakernels.facts import block_of
from megakernels.ops.fp8_experts.facts import BETWEEN_TILE, TURNED_TILE
from megakernels.ops.fp8_experts.reference import FORMAT, Groups
from megakernels.ops.fp8_linear.delayed import Delayed
from megakernels.ops.fp8_linear.facts import WHOLE
from megakernels.ops.fp8_linear.kernel import (
    FRACTION_BITS,
    LARGEST_EXPONENT,
    LEAST,
    eight_bits,
    magnitudes,
    reciprocal,
    saturated,
    scale_of,
    scales,
)
from megakernels.ops.fp8_linear.reference import Operand
from megakernels.ops.moe import kernel as moe
from megakernels.ops.moe import kernel_plan
from megakernels.ops.moe.inputs import Experts
from megakernels.ops.moe.kernel_plan import Tiles
from megakernels.ops.moe.kernel_products import hidden_of, slopes_of
from megakernels.ops.moe.sizes import sizes_of as expert_sizes


@triton.jit  # type: ignore[untyped-decorator]
def rows_at(x, rows, row, there, column, num_columns, stride, top_k, GATHERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of x, or those of their tokens; zeros outside."""
    place = row
    if GATHERS:
        place = tl.load(rows + row, mask=there, other=0) // top_k
    mask = there[:, None] & (column < num_columns)[None, :]
    return widen(tl.load(x + place.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0))


@triton.jit  # type: ignore[untyped-decorator]
def fp8_group_kernel(  # type: ignore[no-untyped-def]
    x, rows, ends, stops, one, largest_seen, scales, data, num_columns, stride, top_k, copy_columns,
    GATHERS: tl.constexpr, OWN: tl.constexpr, GIVEN: tl.constexpr, LIMIT: tl.constexpr, EXPONENT: tl.constexpr, FRACTION_BITS: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Writes the eight-bit transpose [num_columns, copy_columns] of rows that are sorted by expert, and a scale of each expert's column.

    With `GIVEN` the factor is `one`, and the largest magnitude of the rows is joined to `largest_seen`, int32 bits of fp32.

    A program takes SIDE columns of one expert's rows. The copy has a range of columns for each expert: its rows, then zeros.
    """
    expert = tl.program_id(1)
    column, near = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.arange(0, ROWS)
    inside = column < num_columns
    start, stop = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    first, last = tl.load(stops + expert - 1, mask=expert > 0, other=0), tl.load(stops + expert)
    if OWN:
        largest = tl.full([SIDE], LEAST, tl.int32)
        for begin in range(start, stop, ROWS):
            own = begin + near
            found = rows_at(x, rows, own, own < stop, column, num_columns, stride, top_k, GATHERS)
            largest = tl.maximum(largest, tl.max(magnitudes(found), 0))
        scale = scale_of(largest, EXPONENT)
    else:
        scale = tl.load(one).to(tl.float32) + tl.zeros([SIDE], dtype=tl.float32)
    if GIVEN:
        factor, scale = scale, tl.math.div_rn(1.0, scale)
    else:
        factor = reciprocal(scale)
    seen = tl.zeros([SIDE], dtype=tl.int32)
    tl.store(scales + expert.to(tl.int64) * num_columns + column, scale, mask=inside)
    for place in range(first, last, ROWS):
        row = start + (place - first) + near
        found = rows_at(x, rows, row, row < stop, column, num_columns, stride, top_k, GATHERS)
        if GIVEN:
            seen = tl.maximum(seen, tl.max(magnitudes(found), 0))
            bits = eight_bits(saturated(found * factor[None, :], LIMIT), FRACTION_BITS=FRACTION_BITS)
        else:
            bits = eight_bits(found * factor[None, :], FRACTION_BITS=FRACTION_BITS)
        mask = inside[:, None] & (place + near < last)[None, :]
        tl.store(data + column.to(tl.int64)[:, None] * copy_columns + (place + near)[None, :], tl.trans(bits), mask=mask)
    if GIVEN:
        tl.atomic_max(largest_seen, tl.max(seen, 0))


@triton.jit  # type: ignore[untyped-decorator]
def experts_of(row, there, ends, num_experts, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of each row."""
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < num_experts, other=2147483647)
    return tl.where(there, tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1), 0)


@triton.jit
def biases_of(bias, expert, mask, col, num_cols):  # type: ignore[no-untyped-def]
    """Each row's expert's bias."""
    return tl.load(bias + expert.to(tl.int64)[:, None] * num_cols + col[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(num_rows, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's rows and columns, which rows and elements exist, and where they are."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    there = row < num_rows
    return row, col, there, there[:, None] & (col < num_cols)[None, :], row.to(tl.int64)[:, None] * num_cols + col[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def fp8_hidden_kernel(  # type: ignore[no-untyped-def]
    gate_out, up_out, gate_bias, up_bias, weights, rows, ends, hidden, num_rows, num_experts, num_cols, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of the weighted activations; sums with biases are rounded and stored in the products' place."""
    row, col, there, mask, place = tile_of(num_rows, num_cols, ROWS, COLS)
    weight = tl.load(weights + tl.load(rows + row, mask=there, other=0), mask=there, other=0.0).to(tl.float32)
    up = tl.load(up_out + place, mask=mask, other=0.0).to(tl.float32)
    gate = up
    if GATED:
        gate = tl.load(gate_out + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_UP_BIAS or HAS_GATE_BIAS:
        expert = experts_of(row, there, ends, num_experts, EXPERTS)
        if HAS_UP_BIAS:
            sums = narrow(up + biases_of(up_bias, expert, mask, col, num_cols), up_out.dtype.element_ty)
            tl.store(up_out + place, sums, mask=mask)
            up = sums.to(tl.float32)
        if HAS_GATE_BIAS:
            others = narrow(gate + biases_of(gate_bias, expert, mask, col, num_cols), up_out.dtype.element_ty)
            tl.store(gate_out + place, others, mask=mask)
            gate = others.to(tl.float32)
    if not GATED:
        gate = up
    tl.store(hidden + place, narrow(hidden_of(gate, up, limit, KIND) * weight[:, None], hidden.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_pull_kernel(  # type: ignore[no-untyped-def]
    pulled, gate_out, up_out, weights, rows, grad_gate_out, grad_up_out, hidden, grad_weights, num_rows, num_cols, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Some rows' gradients of gate_out and up_out, weighted activations, and gradients of their weights, some columns at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    pair = tl.load(rows + row, mask=there, other=0)
    weight = tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, num_cols, COLS):
        col = first + tl.arange(0, COLS)
        mask = there[:, None] & (col < num_cols)[None, :]
        place = row.to(tl.int64)[:, None] * num_cols + col[None, :]
        grad = tl.load(pulled + place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_out + place, mask=mask, other=0.0).to(tl.float32)
        gate = up
        if GATED:
            gate = tl.load(gate_out + place, mask=mask, other=0.0).to(tl.float32)
        acted = hidden_of(gate, up, limit, KIND)
        total += tl.sum(grad * acted, 1)
        tl.store(hidden + place, narrow(acted * weight, hidden.dtype.element_ty), mask=mask)
        by_gate, by_up = slopes_of(gate, up, limit, KIND)
        grad *= weight
        if GATED:
            tl.store(grad_gate_out + place, narrow(grad * by_gate, grad_gate_out.dtype.element_ty), mask=mask)
        tl.store(grad_up_out + place, narrow(grad * by_up, grad_up_out.dtype.element_ty), mask=mask)
    tl.store(grad_weights + pair, total, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_down_bias_kernel(  # type: ignore[no-untyped-def]
    out, bias, weights, rows, ends, num_rows, num_experts, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Adds to a tile of rows their experts' biases, multiplied by the rows' weights."""
    row, col, there, mask, place = tile_of(num_rows, num_cols, ROWS, COLS)
    weight = tl.load(weights + tl.load(rows + row, mask=there, other=0), mask=there, other=0.0).to(tl.float32)
    value = biases_of(bias, experts_of(row, there, ends, num_experts, EXPERTS), mask, col, num_cols)
    found = tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, narrow(found + weight[:, None] * value, out.dtype.element_ty), mask=mask)


def turned(
    x: Tensor, groups: Groups, *, by_row: bool, rows: Tensor | None = None, top_k: int = 1, delayed: Delayed | None = None
) -> Operand:
    """Follows the contract of `reference.turned`."""
    num_columns, count = x.shape[1], groups.counts.shape[0]
    data = torch.empty(num_columns, groups.columns, dtype=FORMAT, device=x.device)
    found = torch.empty(count * num_columns, dtype=torch.float32, device=x.device)
    one = delayed.factor if delayed is not None else found if by_row else scales(x, FORMAT, WHOLE, 1)
    largest = groups.ends if delayed is None else delayed.largest.view(torch.int32)  # not read if no limit is given
    with on_device_of(x):
        fp8_group_kernel[(triton.cdiv(num_columns, TURNED_TILE["SIDE"]), count)](
            x, groups.ends if rows is None else rows, groups.ends, groups.stops, one, largest, found, data.view(torch.uint8), num_columns,
            x.stride(0),
            top_k, groups.columns,
            GATHERS=rows is not None, OWN=by_row, GIVEN=delayed is not None, LIMIT=torch.finfo(FORMAT).max,
            EXPONENT=LARGEST_EXPONENT[FORMAT], FRACTION_BITS=FRACTION_BITS[FORMAT], **TURNED_TILE,
        )  # fmt: skip
    return Operand(data, found)


def hidden_rows(gate_out: Tensor | None, up_out: Tensor, given: Experts, groups: Groups) -> Tensor:
    """Follows the contract of `reference.hidden_rows`."""
    hidden = torch.empty_like(up_out)
    (num_rows, width), count = up_out.shape, groups.counts.shape[0]
    if num_rows:
        weights = given.weights.contiguous()
        with on_device_of(up_out):
            fp8_hidden_kernel[_tiles(num_rows, width)](
                up_out if gate_out is None else gate_out, up_out, given_or(given.gate_bias, weights), given_or(given.up_bias, weights),
                weights, given.rows, groups.ends, hidden, num_rows, count, width, given.limit or 0.0,
                KIND=moe.kind_of(given), GATED=gate_out is not None, HAS_GATE_BIAS=given.gate_bias is not None,
                HAS_UP_BIAS=given.up_bias is not None, EXPERTS=block_of(count), **BETWEEN_TILE,
            )  # fmt: skip
    return hidden


def add_down_bias(products: Tensor, given: Experts, groups: Groups) -> None:
    """Follows the contract of `reference.add_down_bias`."""
    (num_rows, width), count = products.shape, groups.counts.shape[0]
    if given.down_bias is not None and num_rows:
        with on_device_of(products):
            fp8_down_bias_kernel[_tiles(num_rows, width)](
                *(products, given.down_bias.contiguous(), given.weights.contiguous(), given.rows, groups.ends, num_rows, count, width),
                EXPERTS=block_of(count),
                **BETWEEN_TILE,
            )


def pull(
    pulled: Tensor, gate_out: Tensor | None, up_out: Tensor, given: Experts, _groups: Groups
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.pull`."""
    (num_rows, width), weights = up_out.shape, given.weights.contiguous()
    grad_up_out, hidden = torch.empty_like(up_out), torch.empty_like(up_out)
    grad_gate_out = None if gate_out is None else torch.empty_like(gate_out)
    grad_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    if num_rows:
        with on_device_of(up_out):
            fp8_pull_kernel[(triton.cdiv(num_rows, BETWEEN_TILE["ROWS"]),)](
                pulled, up_out if gate_out is None else gate_out, up_out, weights, given.rows,
                grad_up_out if grad_gate_out is None else grad_gate_out, grad_up_out, hidden, grad_weights, num_rows, width,
                given.limit or 0.0,
                KIND=moe.kind_of(given), GATED=gate_out is not None, **BETWEEN_TILE,
            )  # fmt: skip
    return grad_gate_out, grad_up_out, hidden, grad_weights


def bias_gradients(
    grad_y: Tensor, grad_weights: Tensor, given: Experts, grad_gate_out: Tensor | None, grad_up_out: Tensor, groups: Groups
) -> list[Tensor]:
    """Follows the contract of `reference.bias_gradients`."""
    tiles, found = Tiles(groups.ends, groups.stops, 0, 0), []
    for bias, grad in ((given.gate_bias, grad_gate_out), (given.up_bias, grad_up_out)):
        if bias is not None and grad is not None:
            found.append(moe.bias_gradient(tiles, bias, grad))
    if given.down_bias is not None:
        shares = torch.empty(expert_sizes(given).bias_shares(weights=True), given.rows.shape[0], dtype=torch.float32, device=grad_y.device)
        found.append(moe.down_bias_gradient(tiles, given, grad_y, shares, needed=True))
        grad_weights.add_(shares.sum(0).view(grad_weights.shape))
    return [each for each in found if each is not None]


def sum_rows(x: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Follows the contract of `reference.sum_rows`."""
    return kernel_plan.sum_rows(x, rows, top_k)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, BETWEEN_TILE["ROWS"]), triton.cdiv(columns, BETWEEN_TILE["COLS"])
