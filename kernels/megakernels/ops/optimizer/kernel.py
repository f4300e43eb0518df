"""Triton kernels of optimizers' updates: one pass over each tensor, in fp32 between reading and writing."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of
from megakernels.ops.optimizer.facts import UPDATE_BLOCK


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
    momentum, gradient, update,
    num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride,
    moving, ahead, scale,
    BLOCK: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """A block of momentum and update."""
    at, own, mask = places(num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride, BLOCK, DENSE)
    grad = tl.load(gradient + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * scale
    before = tl.load(momentum + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    after = before + moving * (grad - before)
    tl.store(momentum + at, narrow(after, momentum.dtype.element_ty), mask=mask)
    tl.store(update + own, narrow(after + ahead * grad, update.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def decayed_add_kernel(  # type: ignore[no-untyped-def]
    weight, update,
    num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride,
    decay, rate,
    BLOCK: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """A block of a weight."""
    at, own, mask = places(num_elements, num_rows, num_cols, matrix_stride, row_stride, col_stride, BLOCK, DENSE)
    before = tl.load(weight + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    change = tl.load(update + own, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(weight + at, narrow(before * decay - rate * change, weight.dtype.element_ty), mask=mask)


def shape_of(tensor: Tensor) -> tuple[tuple[int, int, int, int, int, int], bool]:
    """Elements, rows, columns and strides of a tensor of up to three dims, and if it is dense."""
    found = tensor if tensor.dim() == 3 else tensor.reshape(1, 1, -1) if tensor.dim() < 2 else tensor[None]
    sizes = tensor.numel(), found.shape[1], found.shape[2], *found.stride()
    return sizes, tensor.is_contiguous()


def nesterov(momenta: Sequence[Tensor], gradients: Sequence[Tensor], updates: Sequence[Tensor], keep: float, scale: float) -> None:
    """Follows the contract of `reference.nesterov`."""
    for momentum, gradient, update in zip(momenta, gradients, updates, strict=True):
        sizes, dense = shape_of(update)
        if sizes[0]:
            with on_device_of(momentum):
                nesterov_kernel[(triton.cdiv(sizes[0], UPDATE_BLOCK),)](
                    momentum, gradient, update, *sizes, 1 - keep, (1 - keep) / keep, scale, BLOCK=UPDATE_BLOCK, DENSE=dense, num_warps=4
                )


def decayed_add(weights: Sequence[Tensor], updates: Sequence[Tensor], decay: float, rates: Sequence[float]) -> None:
    """Follows the contract of `reference.decayed_add`."""
    for weight, update, rate in zip(weights, updates, rates, strict=True):
        sizes, dense = shape_of(update)
        if sizes[0]:
            with on_device_of(weight):
                decayed_add_kernel[(triton.cdiv(sizes[0], UPDATE_BLOCK),)](
                    weight, update, *sizes, decay, rate, BLOCK=UPDATE_BLOCK, DENSE=dense, num_warps=4
                )
