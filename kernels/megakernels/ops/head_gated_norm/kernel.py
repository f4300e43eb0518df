"""Triton kernels of the norm of each head times its activated gate.

A tile is a few rows, one head of one position each. Forward: one tile per program. Backward: a fixed number of programs, each iterating
over its tiles with its share of the weight gradient in registers; the shares are summed afterwards in a fixed order, so results are bitwise
reproducible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, num_multiprocessors, on_device_of, sigmoid, unit_stride
from megakernels.facts import block_of
from megakernels.ops.head_gated_norm.facts import HEAD_LARGEST_WIDTH, HEAD_TILE_ELEMENTS, PROGRAMS_PER_MULTIPROCESSOR, UNALIGNED_ELEMENTS


@triton.jit  # type: ignore[untyped-decorator]
def activation_of(gate, SIGMOID: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activated gate and its derivative."""
    share = sigmoid(gate)
    if SIGMOID:
        return share, share * (1.0 - share)
    else:  # noqa: RET505  one branch is compiled
        return gate * share, share * (1.0 + gate * (1.0 - share))


@triton.jit  # type: ignore[untyped-decorator]
def head_gated_norm_forward_kernel(  # type: ignore[no-untyped-def]
    x, gate, weight, y, rstd,
    x_stride, gate_stride,
    num_rows, width, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """ROWS rows of y = x · rstd · weight · activation(gate)."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside, exists = column < width, row < num_rows
    mask = exists[:, None] & inside[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    opened = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    active, _slope = activation_of(opened, SIGMOID=SIGMOID)
    found = value * scale[:, None] * gain[None, :] * active
    tl.store(rstd + row, scale, mask=exists)
    tl.store(y + row[:, None] * width + column[None, :], narrow(found, y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def head_gated_norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, gate, weight, rstd, grad_x, grad_gate, partial,
    grad_stride, x_stride, gate_stride,
    num_rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SIGMOID: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_GATE: tl.constexpr,
):  # fmt: skip
    """Tiles program, program + num_programs, ... of the gradients of x and gate, and their share of the weight's."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        exists = row < num_rows
        mask = exists[:, None] & inside[None, :]
        scale = tl.load(rstd + row, mask=exists, other=0.0).to(tl.float32)
        normed = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32) * scale[:, None]
        opened = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        active, slope = activation_of(opened, SIGMOID=SIGMOID)
        share += grad * normed * active
        place = row[:, None] * width + column[None, :]
        if NEEDS_X:
            inner = grad * gain[None, :] * active
            mean = tl.sum(inner * normed, 1) / width
            tl.store(grad_x + place, narrow((inner - normed * mean[:, None]) * scale[:, None], grad_x.dtype.element_ty), mask=mask)
        if NEEDS_GATE:
            tl.store(grad_gate + place, narrow(grad * normed * gain[None, :] * slope, grad_gate.dtype.element_ty), mask=mask)
    tl.store(partial + tl.program_id(0) * width + column, tl.sum(share, 0), mask=inside)


def accepts(x: Tensor) -> bool:
    """True if the kernels support heads of this width."""
    return x.shape[-1] <= HEAD_LARGEST_WIDTH


def launch_options(width: int) -> dict[str, int]:
    """Tile and warps for a head's width."""
    block = block_of(width)
    return {"ROWS": max(1, (UNALIGNED_ELEMENTS if width % 16 else HEAD_TILE_ELEMENTS) // block), "BLOCK": block, "num_warps": 4}


def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    rows, gates = _rows(x), _rows(gate)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    options = launch_options(rows.shape[1])
    if rows.numel():
        with on_device_of(x):
            head_gated_norm_forward_kernel[(triton.cdiv(rows.shape[0], options["ROWS"]),)](
                rows, gates, weight.contiguous(), y, rstd, rows.stride(0), gates.stride(0), *rows.shape, eps, SIGMOID=sigmoid, **options
            )
    return y, rstd


def backward(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, sigmoid: bool, needs: list[bool]
) -> list[Tensor | None]:
    """Follows the contract of `reference.backward`."""
    rows, gates, grads = _rows(x), _rows(gate), _rows(grad_y)
    options = launch_options(rows.shape[1])
    num_programs = min(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(x.device), triton.cdiv(rows.shape[0], options["ROWS"]))
    grad_x, grad_gate = (
        torch.empty(like.shape, dtype=like.dtype, device=x.device) if need else None
        for like, need in zip((x, gate), needs[:2], strict=True)
    )
    partial = torch.empty(num_programs, rows.shape[1], dtype=torch.float32, device=x.device)
    if rows.numel():
        with on_device_of(x):
            head_gated_norm_backward_kernel[(num_programs,)](
                grads, rows, gates, weight.contiguous(), rstd.contiguous(), partial if grad_x is None else grad_x,
                partial if grad_gate is None else grad_gate, partial,
                grads.stride(0), rows.stride(0), gates.stride(0),
                *rows.shape,
                SIGMOID=sigmoid, NEEDS_X=needs[0], NEEDS_GATE=needs[1], **options,
            )  # fmt: skip
    return [grad_x, grad_gate, partial.sum(0).to(weight.dtype) if needs[2] else None]


def _rows(x: Tensor) -> Tensor:
    """`x` as rows of unit stride; heads of a wider row stay a view."""
    return unit_stride(x.reshape(-1, x.shape[-1]))
