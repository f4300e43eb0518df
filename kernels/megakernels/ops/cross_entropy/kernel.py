"""Triton kernels of the cross entropy: one program per row that adds a slice of logits to the row's statistics, and tiles of the gradient.

A slice may be the full vocabulary. Only a row's statistics are stored in fp32, and the gradient may overwrite the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of, unit_stride
from megakernels.facts import block_of
from megakernels.ops.cross_entropy.facts import LOSS_STEP_COLUMNS, LOSS_TILE_COLUMNS

NO_LOGIT = tl.constexpr(-3.0e38)
"""A finite value below all relevant logits, so that differences are never NaN."""


@triton.jit  # type: ignore[untyped-decorator]
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits, labels, lse, chosen, row_stride, num_words, first, STEP: tl.constexpr
):
    """Adds the columns first … first + num_words − 1 of a row to its log-sum-exp, and reads the label's logit if it is among them."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    place = tl.arange(0, STEP)
    largest = tl.full([STEP], NO_LOGIT, dtype=tl.float32)
    total = tl.zeros([STEP], dtype=tl.float32)
    for start in range(0, num_words, STEP):
        value = tl.load(base + start + place, mask=place < num_words - start, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, value)
        total = total * tl.exp(largest - higher) + tl.exp(value - higher)
        largest = higher
    before = tl.load(lse + row).to(tl.float32)
    top = tl.maximum(tl.max(largest, 0), before)
    tl.store(lse + row, top + tl.log(tl.sum(total * tl.exp(largest - top), 0) + tl.exp(before - top)))
    word = tl.load(labels + row) - first
    inside = (word >= 0) & (word < num_words)
    logit = tl.load(base + word, mask=inside, other=0.0).to(tl.float32)
    tl.store(chosen + row, logit, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits, labels, lse, slope, share, grad, row_stride, num_words, first, TILE: tl.constexpr
):
    """A tile of exp(logits − lse) · slope, minus share at the row's label; every element is read before it is written."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = word < num_words
    value = tl.load(logits + row * row_stride + word, mask=mask, other=-float("inf")).to(tl.float32)
    found = tl.exp(value - tl.load(lse + row).to(tl.float32)) * tl.load(slope + row).to(tl.float32)
    own = tl.where(word == tl.load(labels + row) - first, tl.load(share + row).to(tl.float32), 0.0)
    tl.store(grad + row * num_words + word, narrow(found - own, grad.dtype.element_ty), mask=mask)


def join_slice(logits: Tensor, labels: Tensor, first: int, lse: Tensor, chosen: Tensor) -> None:
    """Adds a slice of the vocabulary to the statistics of each row, in place.

    Args:
        logits: [N, W], columns from `first`, fp32, bf16 or fp16.
        labels: int64 [N]; a label outside the slice does not change `chosen`.
        first: First vocabulary id of the slice.
        lse: fp32 [N], log-sum-exp of the columns before; −inf if there are none.
        chosen: fp32 [N], logit of the label.
    """
    logits = unit_stride(logits)
    num_rows, num_words = logits.shape
    if logits.numel():
        with on_device_of(logits):
            statistics_kernel[(num_rows,)](
                logits, labels.contiguous(), lse, chosen, logits.stride(0), num_words, first, **statistics_options(num_words)
            )


def slice_gradient(logits: Tensor, labels: Tensor, first: int, lse: Tensor, slope: Tensor, share: Tensor, grad: Tensor) -> Tensor:
    """exp(logits − lse) · slope, minus share at each row's label, into `grad` [N, W], contiguous, which may be the logits.

    Args:
        logits: [N, W], columns from `first`, fp32, bf16 or fp16.
        labels: int64 [N]; for a label outside the slice nothing is subtracted.
        first: First vocabulary id of the slice.
        lse: fp32 [N], log-sum-exp of the full vocabulary.
        slope: fp32 [N], factor of the softmax.
        share: fp32 [N], value subtracted at the label.
        grad: [N, W], output.
    """
    logits = unit_stride(logits)
    num_rows, num_words = logits.shape
    options = gradient_options(num_words)
    if logits.numel():
        with on_device_of(logits):
            gradient_kernel[(num_rows, triton.cdiv(num_words, options["TILE"]))](
                logits, labels.contiguous(), lse, slope, share, grad, logits.stride(0), num_words, first, **options
            )
    return grad


def statistics_options(num_words: int) -> dict[str, int]:
    """Step and warps for a slice of `num_words`."""
    return {"STEP": min(LOSS_STEP_COLUMNS, block_of(num_words)), "num_warps": 8}


def gradient_options(num_words: int) -> dict[str, int]:
    """Tile and warps for a slice of `num_words`."""
    return {"TILE": min(LOSS_TILE_COLUMNS, block_of(num_words)), "num_warps": 4}


def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`."""
    lse, chosen = slice_forward(logits, labels, 0)
    return torch.where(labels != ignore_index, lse - chosen, 0).sum(), lse


def backward(grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    """Follows the contract of `reference.backward`."""
    return slice_backward(grad_loss, logits, labels, lse, 0, ignore_index)


def slice_forward(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.slice_forward`."""
    lse = torch.full(labels.shape, -torch.inf, dtype=torch.float32, device=logits.device)
    chosen = torch.zeros_like(lse)
    join_slice(logits, labels, first, lse, chosen)
    return lse, chosen


def slice_backward(grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignore_index: int) -> Tensor:
    """Follows the contract of `reference.slice_backward`."""
    share = torch.where(labels != ignore_index, grad_loss.to(lse.dtype), 0)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return slice_gradient(logits, labels, first, lse, share, share, grad)
