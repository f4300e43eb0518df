"""Triton kernels of xielu: a tile of elements per program forward, a fixed number of programs with their sums backward.

The sums of alphas' gradients are taken in two steps without atomics, in an order that does not depend on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of, sigmoid
from megakernels.facts import block_of
from megakernels.ops.activation.facts import NUM_XIELU_SUMS, XIELU_TILE


@triton.jit
def factors(alphas):  # type: ignore[no-untyped-def]
    """softplus(alphas[0]) and 1/2 + softplus(alphas[1])."""
    above = tl.load(alphas).to(tl.float32)
    below = tl.load(alphas + 1).to(tl.float32)
    above = tl.maximum(above, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(above)))
    below = tl.maximum(below, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(below)))
    return above, below + 0.5


@triton.jit
def bend(x):  # type: ignore[no-untyped-def]
    """exp(x) − 1 − x of fp32 elements that are not positive: near zero by its series, where the difference would cancel."""
    series = x * x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0))))
    return tl.where(x > -0.125, series, tl.exp(x) - 1.0 - x)


@triton.jit  # type: ignore[untyped-decorator]
def activation_xielu_forward_kernel(x, alphas, y, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of xielu."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < size
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    above, below = factors(alphas)
    found = tl.where(value > 0.0, above * value * value, below * bend(tl.minimum(value, 0.0))) + 0.5 * value
    tl.store(y + place, narrow(found, y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def activation_xielu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y, x, alphas, grad_x, sums, size, tiles_each, num_sums, TILE: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_ALPHAS: tl.constexpr
):
    """Tiles of the gradient of x, and this program's sums of grad_y times each factor's multiplicand; `sums` [2, num_sums]."""
    above, below = factors(alphas)
    start = tl.program_id(0).to(tl.int64) * tiles_each * TILE
    squares = tl.zeros([TILE], tl.float32)
    bends = tl.zeros([TILE], tl.float32)
    for tile in range(tiles_each):
        place = start + tile * TILE + tl.arange(0, TILE)
        mask = place < size
        grad = tl.load(grad_y + place, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        bent = bend(tl.minimum(value, 0.0))
        if NEEDS_X:
            slope = tl.where(value > 0.0, 2.0 * above * value, below * (bent + value)) + 0.5
            tl.store(grad_x + place, narrow(grad * slope, grad_x.dtype.element_ty), mask=mask)
        if NEEDS_ALPHAS:
            positive = tl.maximum(value, 0.0)
            squares += grad * positive * positive
            bends += grad * bent
    if NEEDS_ALPHAS:
        tl.store(sums + tl.program_id(0), tl.sum(squares, 0))
        tl.store(sums + num_sums + tl.program_id(0), tl.sum(bends, 0))


@triton.jit  # type: ignore[untyped-decorator]
def activation_xielu_alphas_kernel(sums, alphas, grad_alphas, num_sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradients of both alphas from the programs' sums."""
    place = tl.arange(0, BLOCK)
    squares = tl.sum(tl.load(sums + place, mask=place < num_sums, other=0.0).to(tl.float32), 0)
    bends = tl.sum(tl.load(sums + num_sums + place, mask=place < num_sums, other=0.0).to(tl.float32), 0)
    tl.store(grad_alphas, narrow(squares * sigmoid(tl.load(alphas).to(tl.float32)), grad_alphas.dtype.element_ty))
    tl.store(grad_alphas + 1, narrow(bends * sigmoid(tl.load(alphas + 1).to(tl.float32)), grad_alphas.dtype.element_ty))


def forward(x: Tensor, alphas: Tensor) -> Tensor:
    """Follows the contract of the reference's, for fp32, bf16 and fp16."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with on_device_of(x):
            activation_xielu_forward_kernel[(triton.cdiv(x.numel(), XIELU_TILE),)](
                x.contiguous(), alphas.contiguous(), y, x.numel(), TILE=XIELU_TILE, num_warps=4
            )
    return y


def backward(grad_y: Tensor, x: Tensor, alphas: Tensor, needs: list[bool]) -> tuple[Tensor | None, ...]:
    """Follows the contract of the reference's: the gradients of x and alphas."""
    size, alphas = x.numel(), alphas.contiguous()
    if not size:
        return tuple(torch.zeros_like(like) if need else None for like, need in zip((x, alphas), needs, strict=True))
    grad_x, grad_alphas = (
        torch.empty(like.shape, dtype=like.dtype, device=x.device) if need else None for like, need in zip((x, alphas), needs, strict=True)
    )
    tiles = triton.cdiv(size, XIELU_TILE)
    tiles_each = triton.cdiv(tiles, NUM_XIELU_SUMS)
    num_sums = triton.cdiv(tiles, tiles_each)
    grad_rows, sums = grad_y.contiguous(), torch.empty(2, num_sums, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        activation_xielu_backward_kernel[(num_sums,)](
            grad_rows, x.contiguous(), alphas, grad_rows if grad_x is None else grad_x, sums, size, tiles_each, num_sums,
            TILE=XIELU_TILE, NEEDS_X=needs[0], NEEDS_ALPHAS=needs[1], num_warps=4,
        )  # fmt: skip
        if grad_alphas is not None:
            activation_xielu_alphas_kernel[(1,)](sums, alphas, grad_alphas, num_sums, BLOCK=block_of(num_sums), num_warps=4)
    return grad_x, grad_alphas
