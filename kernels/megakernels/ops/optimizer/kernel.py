"""Triton kernels of optimizers' updates: one pass over each tensor, in fp32 between reading and writing.

Values that change between steps, rates and factors in fp64, are read on the device: a recorded launch holds no number of its step.
"""

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of
from megakernels.ops.optimizer.facts import ADAMW_BLOCK, UPDATE_BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def places(  # type: ignore[no-untyped-def]
    num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride, BLOCK: tl.constexpr, DENSE: tl.constexpr
):
    """Places of a block in a dense tensor and in the strided one, and their mask."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = at
    if not DENSE:
        row = at // num_cols
        own = row // num_rows * matrix_stride + row % num_rows * row_stride + at % num_cols * col_stride
    return at, own, at < num_elements


@triton.jit  # type: ignore[untyped-decorator]
def nesterov_kernel(  # type: ignore[no-untyped-def]
    momentum, gradient, update, scale,
    num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride,
    moving, ahead,
    BLOCK: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """A block of momentum and update."""
    at, own, mask = places(num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride, BLOCK, DENSE)
    factor = tl.load(scale).to(tl.float32)
    grad = tl.load(gradient + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * factor
    before = tl.load(momentum + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    after = before + moving * (grad - before)
    tl.store(momentum + at, narrow(after, momentum.dtype.element_ty), mask=mask)
    tl.store(update + own, narrow(after + ahead * grad, update.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def decayed_add_kernel(  # type: ignore[no-untyped-def]
    weight, update, rate,
    num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride,
    weight_decay, factor,
    BLOCK: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """A block of a weight."""
    lr = tl.load(rate).to(tl.float64)
    decay = (1.0 - lr * weight_decay).to(tl.float32)
    size = (lr * factor).to(tl.float32)
    at, own, mask = places(num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride, BLOCK, DENSE)
    before = tl.load(weight + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    change = tl.load(update + own, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(weight + at, narrow(before * decay - size * change, weight.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def adamw_kernel(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, step, rate, scale,
    num_elements,
    beta1, beta2, bits1, bits2, eps, weight_decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a weight and its averages. `bits` are the binary logarithms of the betas."""
    count = tl.load(step)
    lr = tl.load(rate).to(tl.float64)
    decay = (1.0 - lr * weight_decay).to(tl.float32)
    factor = tl.load(scale).to(tl.float32)
    size = lr.to(tl.float32) / (1.0 - tl.exp2(count * bits1))
    root = tl.sqrt(1.0 - tl.exp2(count * bits2))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_elements
    grad = tl.load(gradient + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * factor
    mean = tl.load(first + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    square = tl.load(second + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    before = tl.load(weight + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    mean = beta1 * mean + (1.0 - beta1) * grad
    square = beta2 * square + (1.0 - beta2) * grad * grad
    after = before * decay - size * mean / (tl.sqrt(square) / root + eps)
    tl.store(first + at, narrow(mean, first.dtype.element_ty), mask=mask)
    tl.store(second + at, narrow(square, second.dtype.element_ty), mask=mask)
    tl.store(weight + at, narrow(after, weight.dtype.element_ty), mask=mask)


def shape_of(tensor: Tensor) -> tuple[tuple[int, ...], bool]:
    """Elements, rows, columns and strides of a tensor of up to three dims, and if it is dense."""
    found = tensor if tensor.dim() == 3 else tensor.reshape(1, 1, -1) if tensor.dim() < 2 else tensor[None]
    sizes = tensor.numel(), found.shape[1], found.shape[2], *found.stride()
    return sizes, tensor.is_contiguous()


def nesterov(momenta: Sequence[Tensor], gradients: Sequence[Tensor], updates: Sequence[Tensor], keep: float, scale: Tensor) -> None:
    """Follows the contract of `reference.nesterov`."""
    for momentum, gradient, update in zip(momenta, gradients, updates, strict=True):
        sizes, dense = shape_of(update)
        if sizes[0]:
            with on_device_of(momentum):
                nesterov_kernel[(triton.cdiv(sizes[0], UPDATE_BLOCK),)](
                    momentum, gradient, update, scale, *sizes, 1 - keep, (1 - keep) / keep, BLOCK=UPDATE_BLOCK, DENSE=dense, num_warps=4
                )


def decayed_add(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: Tensor, weight_decay: float, factors: Sequence[float]) -> None:
    """Follows the contract of `reference.decayed_add`."""
    for weight, update, factor in zip(weights, updates, factors, strict=True):
        sizes, dense = shape_of(update)
        if sizes[0]:
            with on_device_of(weight):
                decayed_add_kernel[(triton.cdiv(sizes[0], UPDATE_BLOCK),)](
                    weight, update, rate, *sizes, weight_decay, factor, BLOCK=UPDATE_BLOCK, DENSE=dense, num_warps=4
                )


def adamw(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], steps: Sequence[Tensor],
    lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, scale: Tensor,
) -> None:  # fmt: skip
    """Follows the contract of `reference.adamw`, and does not change the gradients."""
    numbers = beta1, beta2, math.log2(beta1), math.log2(beta2), eps, weight_decay
    for each in zip(weights, gradients, first, second, steps, strict=True):
        num_elements = each[0].numel()
        if num_elements:
            with on_device_of(each[0]):
                adamw_kernel[(triton.cdiv(num_elements, ADAMW_BLOCK),)](
                    *each, lr, scale, num_elements, *numbers, BLOCK=ADAMW_BLOCK, num_warps=4
                )
