"""Triton kernels of the root-mean-square norm, plain (one group, no gate), gated, and fused with an addition.

A tile is one group of a few rows. Forward: one tile per program. Backward: a fixed number of programs per group, each iterating over its
tiles with its share of the weight gradient in registers; the shares are summed afterwards in a fixed order, so results are bitwise
reproducible without atomics.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, num_multiprocessors, on_device_of, sigmoid, unit_stride
from megakernels.facts import TILE_ELEMENTS, block_of
from megakernels.ops.rms_norm.facts import LARGEST_GATED_FP32_WIDTH, LARGEST_NESTED, NORM_LARGEST_WIDTH


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_tile(tile, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row numbers [ROWS, 1]; a single row is a scalar, so that its tile is flat and has one 64-bit address."""
    first = tl.cast(tile, tl.int64) * ROWS
    if ROWS == 1:
        return first
    else:  # noqa: RET505  one branch is compiled
        return (first + tl.arange(0, ROWS))[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def starts_of(row, stride, inner, step, NESTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of rows, one each `stride` elements; with `NESTED` a run of `inner` rows each `stride`, and its rows each `step`."""
    if NESTED:
        each = tl.cast(row, tl.int32)
        return (each // inner).to(tl.int64) * stride + (each % inner).to(tl.int64) * step
    else:  # noqa: RET505  one branch is compiled
        return row * stride


@triton.jit  # type: ignore[untyped-decorator]
def sum_of_rows(x, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum over the columns, of the shape of `rows_of_tile`."""
    if ROWS == 1:
        return tl.sum(x, 0)
    else:  # noqa: RET505
        return tl.sum(x, 1)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_forward_kernel(  # type: ignore[no-untyped-def]
    x, gate, weight, total, y, rstd,
    x_stride,
    x_inner, x_step,
    gate_stride,
    num_rows, width, num_groups, eps,
    NESTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One group of ROWS rows of y = v · rstd · (OFFSET + weight); v is x, or x · silu(gate), or x + `gate`, stored in total."""
    row = rows_of_tile(tl.program_id(0), ROWS)
    group = tl.program_id(1)
    inside = tl.arange(0, BLOCK) < width
    mask = inside if ROWS == 1 else (row < num_rows) & inside  # a single row is valid
    cols = group * width + tl.arange(0, BLOCK)
    value = tl.load(x + starts_of(row, x_stride, x_inner, x_step, NESTED=NESTED) + cols, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        opened = tl.load(gate + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
        value = value * opened * sigmoid(opened)
    if ADDS:
        kept = narrow(value + tl.load(gate + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32), total.dtype.element_ty)
        tl.store(total + row * (num_groups * width) + cols, kept, mask=mask)
        value = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt(sum_of_rows(value * value, ROWS) / width + eps)
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        gain += OFFSET
    tl.store(rstd + row * num_groups + group, scale, mask=row < num_rows)
    tl.store(y + row * (num_groups * width) + cols, narrow(value * scale * gain, y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, gate, weight, rstd, grad_x, grad_gate, partial,
    grad_stride, x_stride,
    x_inner, x_step,
    gate_stride,
    num_rows, width, num_groups,
    NESTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, NEEDS_X: tl.constexpr,
    NEEDS_GATE: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Tiles program, program + num_programs, ... of one group of grad_x and grad_gate, and their share of the weight gradient.

    For the fused norm, `gate` is the additional gradient of the sum.
    """
    program = tl.program_id(0)
    group = tl.program_id(1)
    inside = tl.arange(0, BLOCK) < width
    cols = group * width + tl.arange(0, BLOCK)
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        gain += OFFSET
    share = tl.zeros([BLOCK] if ROWS == 1 else [ROWS, BLOCK], dtype=tl.float32)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = rows_of_tile(tile, ROWS)
        mask = inside if ROWS == 1 else (row < num_rows) & inside  # a single row is valid
        scale = tl.load(rstd + row * num_groups + group, mask=row < num_rows, other=0.0).to(tl.float32)
        value = tl.load(x + starts_of(row, x_stride, x_inner, x_step, NESTED=NESTED) + cols, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + row * grad_stride + cols, mask=mask, other=0.0).to(tl.float32)
        normed = value * scale
        if GATED:
            opened = tl.load(gate + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
            open_share = sigmoid(opened)
            silu = opened * open_share
            normed = normed * silu
        share += grad * normed
        if NEEDS_X or NEEDS_GATE:
            scaled = grad * gain
            mean = sum_of_rows(scaled * normed, ROWS) / width
            inner = (scaled - normed * mean) * scale
            place = row * (num_groups * width) + cols
            if GATED:
                if NEEDS_GATE:
                    slope = open_share + silu * (1.0 - open_share)
                    tl.store(grad_gate + place, narrow(inner * value * slope, grad_gate.dtype.element_ty), mask=mask)
                inner = inner * silu
            if ADDS:
                inner += tl.load(gate + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
            if NEEDS_X:
                tl.store(grad_x + place, narrow(inner, grad_x.dtype.element_ty), mask=mask)
    if ROWS > 1:
        share = tl.sum(share, 0)
    tl.store(partial + program.to(tl.int64) * (num_groups * width) + cols, share, mask=inside)


def accepts(x: Tensor, num_groups: int, *, gated: bool) -> bool:
    """True if the kernels support groups of this width."""
    return x.shape[-1] // num_groups <= (LARGEST_GATED_FP32_WIDTH if gated and x.dtype == torch.float32 else NORM_LARGEST_WIDTH)


def launch_options(width: int, *, adds: bool = False) -> dict[str, int]:
    """Tile and warps for a group's width: 16 elements of a tile in each thread, which keeps the backward free of spills.

    For the fused norm with several rows per tile 8, because fp32 would spill.
    """
    block = block_of(width)
    rows = max(1, TILE_ELEMENTS // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(4, rows * block // 512) * (2 if adds and rows > 1 else 1)}


def forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, num_groups: int, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Follows the contract of the reference's forwards, for fp32, bf16 and fp16; the rstd of a plain norm is [..., 1] here."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, _forward(x, gate, weight, None, y, eps, num_groups, offset)


def add_forward(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.add_rms_norm_forward`."""
    total, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return total, y, _forward(x, branch, weight, total, y, eps, 1).view(x.shape[:-1])


def _forward(
    x: Tensor, other: Tensor | None, weight: Tensor, total: Tensor | None, y: Tensor, eps: float, num_groups: int, offset: float = 0.0
) -> Tensor:
    """Fills y and, if given, total; `other` is the gate or, with total, the second term. Returns rstd."""
    given = _runs(x)
    others = given.base if other is None else _rows(other)
    rstd = torch.empty(*x.shape[:-1], num_groups, dtype=torch.float32, device=x.device)
    num_rows, num_cols = rstd.numel() // num_groups, x.shape[-1]
    options = launch_options(num_cols // num_groups, adds=total is not None)
    if num_rows:
        with on_device_of(x):
            rms_norm_forward_kernel[(triton.cdiv(num_rows, options["ROWS"]), num_groups)](
                given.base, others, weight.contiguous(), y if total is None else total, y, rstd, *given[1:4],
                others.stride(0),
                num_rows, num_cols // num_groups, num_groups, eps,
                NESTED=given.inner > 1, GATED=other is not None and total is None, ADDS=total is not None, OFFSET=offset, **options,
            )  # fmt: skip
    return rstd


def backward(
    grad_y: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, rstd: Tensor,
    num_groups: int, needs: list[bool], offset: float = 0.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Follows the contract of the reference's backwards: the gradients of x, gate and weight."""
    return _backward(grad_y, x, gate, weight, rstd, num_groups, needs, adds=False, offset=offset)


def add_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Follows the contract of `reference.add_rms_norm_backward`."""
    grad_x, _, grad_weight = _backward(grad_y, total, grad_total, weight, rstd, 1, [needs[0], False, needs[1]], adds=True)
    return grad_x, grad_weight


def _backward(
    grad_y: Tensor, x: Tensor, other: Tensor | None, weight: Tensor, rstd: Tensor,
    num_groups: int, needs: list[bool],
    *, adds: bool, offset: float = 0.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, gate and weight; `other` is the gate or, for the fused norm, the additional gradient of the sum."""
    given, grad_rows = _runs(x), _rows(grad_y)
    others = given.base if other is None else _rows(other)
    num_rows, num_cols = grad_rows.shape
    options = launch_options(num_cols // num_groups, adds=adds)
    # four programs per multiprocessor
    num_programs = min(triton.cdiv(4 * num_multiprocessors(x.device), num_groups), triton.cdiv(num_rows, options["ROWS"]))
    wanted = zip((x, x if other is None else other), needs[:2], strict=True)
    grad_x, grad_gate = (torch.empty(like.shape, dtype=like.dtype, device=x.device) if need else None for like, need in wanted)
    partial = torch.empty(num_programs, num_cols, dtype=torch.float32, device=x.device)
    if num_rows:
        with on_device_of(x):
            rms_norm_backward_kernel[(num_programs, num_groups)](
                grad_rows, given.base, others, weight.contiguous(), rstd, partial if grad_x is None else grad_x,
                partial if grad_gate is None else grad_gate, partial,
                grad_rows.stride(0),
                *given[1:4],
                others.stride(0),
                num_rows, num_cols // num_groups, num_groups,
                NESTED=given.inner > 1, GATED=other is not None and not adds, ADDS=adds, NEEDS_X=needs[0], NEEDS_GATE=needs[1],
                OFFSET=offset, **options,
            )  # fmt: skip
    return grad_x, grad_gate, partial.sum(0).to(weight.dtype) if needs[2] else None


class _Runs(NamedTuple):
    """Rows of unit stride: a run of `inner` rows each `stride` elements, and a row of the run each `step`."""

    base: Tensor
    stride: int
    inner: int
    step: int


def _runs(x: Tensor) -> _Runs:
    """`x` as rows, a view where they are evenly spaced, or runs of such rows are: heads or ranks in a slice of a wider projection."""
    spaced = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    levels: list[tuple[int, int]] = []
    for size, stride in spaced:
        if levels and levels[-1][1] == size * stride:
            size *= levels.pop()[0]  # noqa: PLW2901  both dims are one
        levels.append((size, stride))
    fits = x.numel() and (x.stride(-1) == 1 or x.shape[-1] == 1) and len(levels) == 2 and x.numel() // x.shape[-1] <= LARGEST_NESTED
    if fits:
        (_, stride), (inner, step) = levels
        return _Runs(x, stride, inner, step)
    rows = _rows(x)
    return _Runs(rows, rows.stride(0), 1, 0)


def _rows(x: Tensor) -> Tensor:
    """`x` as rows of unit stride; a slice of a wider projection stays a view."""
    return unit_stride(x.reshape(-1, x.shape[-1]))
