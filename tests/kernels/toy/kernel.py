"""Triton kernels of the scaled square: a tile per program."""

import torch
import triton
import triton.language as tl
from megakernels.ops.toy.facts import SQUARE_TILE
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of


@triton.jit
def square_forward_kernel(x, y, size, factor, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(y + place, narrow(value * value * factor, y.dtype.element_ty), mask=place < size)


@triton.jit
def square_backward_kernel(grad_y, x, grad_x, size, factor, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(grad_x + place, narrow(grad * value * (2 * factor), grad_x.dtype.element_ty), mask=place < size)


def forward(x: Tensor, factor: float) -> Tensor:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16."""
    dense, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with on_device_of(x):
            square_forward_kernel[(triton.cdiv(x.numel(), SQUARE_TILE),)](dense, y, x.numel(), factor, TILE=SQUARE_TILE)
    return y


def backward(grad_y: Tensor, x: Tensor, factor: float, needs: list[bool]) -> list[Tensor | None]:
    """Follows the contract of `reference.backward`."""
    grads, dense, grad_x = grad_y.contiguous(), x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with on_device_of(x):
            square_backward_kernel[(triton.cdiv(x.numel(), SQUARE_TILE),)](grads, dense, grad_x, x.numel(), factor, TILE=SQUARE_TILE)
    return [grad_x if needs[0] else None]
