"""Triton kernels of the root-mean-square norm.

Forward: one program a row. Backward: a fixed number of programs, each walking its own rows and keeping its share of the weight gradient in
registers; the shares are summed afterwards in a fixed order, so repeats are bitwise equal and no atomics are needed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_WIDTH = 8192
"""A row is one tile; the backward of a wider one runs out of registers on sm_90, so wider rows stay with the reference."""


on_device_of: Callable[[Tensor], AbstractContextManager[None]] = torch.cuda.device_of


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_forward_kernel(x, weight, y, rstd, x_stride, num_cols, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row of y = x · rstd · weight."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    value = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / num_cols + eps)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(rstd + row, scale)
    tl.store(y + row * num_cols + cols, (value * scale * gain).to(y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, weight, rstd, grad_x, partial, grad_stride, x_stride, num_rows, num_cols, BLOCK: tl.constexpr, NEEDS_X: tl.constexpr
):
    """Rows program, program + num_programs, ... of grad_x, and their share of the weight gradient."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    share = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(program, num_rows, num_programs):
        row = tl.cast(index, tl.int64)
        scale = tl.load(rstd + row)
        normed = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32) * scale
        grad = tl.load(grad_y + row * grad_stride + cols, mask=mask, other=0.0).to(tl.float32)
        share += grad * normed
        if NEEDS_X:
            scaled = grad * gain
            mean = tl.sum(scaled * normed, 0) / num_cols
            tl.store(grad_x + row * num_cols + cols, ((scaled - normed * mean) * scale).to(grad_x.dtype.element_ty), mask=mask)
    tl.store(partial + program.to(tl.int64) * num_cols + cols, share, mask=mask)


def launch_options(num_cols: int) -> tuple[int, int]:
    """BLOCK and num_warps for a row width: at most 16 elements of a row in each thread, which keeps the backward free of spills."""
    block = triton.next_power_of_2(num_cols)
    return block, max(4, block // 512)


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.rms_norm_forward`, for fp32, bf16 and fp16."""
    rows = _rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block, num_warps = launch_options(rows.shape[1])
    if rows.shape[0]:
        with on_device_of(x):
            rms_norm_forward_kernel[(rows.shape[0],)](
                rows, weight.contiguous(), y, rstd, rows.stride(0), rows.shape[1], eps, BLOCK=block, num_warps=num_warps
            )
    return y, rstd


def backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs: list[bool], num_programs: int
) -> tuple[Tensor | None, Tensor | None]:
    """Same contract as `reference.rms_norm_backward`, with `num_programs` shares of the weight gradient."""
    rows, grad_rows = _rows(x), _rows(grad_y)
    num_rows, num_cols = rows.shape
    num_programs = min(num_programs, num_rows)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    partial = torch.empty(num_programs, num_cols, dtype=torch.float32, device=x.device)
    block, num_warps = launch_options(num_cols)
    if num_rows:
        with on_device_of(x):
            rms_norm_backward_kernel[(num_programs,)](
                grad_rows,
                rows,
                weight.contiguous(),
                rstd,
                partial if grad_x is None else grad_x,
                partial,
                grad_rows.stride(0),
                rows.stride(0),
                num_rows,
                num_cols,
                BLOCK=block,
                NEEDS_X=needs[0],
                num_warps=num_warps,
            )
    return grad_x, partial.sum(0).to(weight.dtype) if needs[1] else None


def programs_for(device: torch.device) -> int:
    """Programs of the backward: four a multiprocessor."""
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _rows(x: Tensor) -> Tensor:
    """`x` as rows of unit stride; a slice of a wider projection stays a view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
