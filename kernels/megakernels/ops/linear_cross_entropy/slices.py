"""The walk over slices of the vocabulary: products by torch, and what is done to each slice of logits by whoever is given.

With g the gradient of a slice's logits, that slice of the weight's gradient is gᵀ x, whole at once, and x's is the sum of g W over the
slices. So the walk needs one slice of logits, and an accumulator of x's size.

The weight may itself be a part of the vocabulary, of the words from `first` on: then its log-sum-exp is that part's, and whoever holds the
parts joins them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, row_blocks, upcast

SLICE_ELEMENTS = 1 << 27
"""Logits held at once: 256 MiB in bf16."""


class OnSlices(Protocol):
    """`megakernels.ops.cross_entropy.kernel`, or the plain `reference` beside this file."""

    def join_slice(self, logits: Tensor, labels: Tensor, first: int, lse: Tensor, chosen: Tensor) -> None:
        """Adds a slice to what is known of each row, in place."""

    def slice_gradient(self, logits: Tensor, labels: Tensor, first: int, lse: Tensor, slope: Tensor, share: Tensor, grad: Tensor) -> Tensor:
        """exp(logits − lse) · slope, less share at each row's label, into `grad`."""


def statistics(x: Tensor, weight: Tensor, labels: Tensor, first: int, on_slices: OnSlices) -> tuple[Tensor, Tensor]:
    """Returns lse [N] of the weight's words and, where the label is one of them, its logit [N], else 0."""
    num_rows = x.shape[0]
    lse = torch.full((num_rows,), -torch.inf, dtype=accumulator_dtype(x.dtype), device=x.device)
    chosen = torch.zeros_like(lse)
    for words in row_blocks(weight.shape[0], num_rows, SLICE_ELEMENTS):
        on_slices.join_slice(x @ weight[words].mT, labels, first + words.start, lse, chosen)
    return lse, chosen


def forward(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, z_loss: float, on_slices: OnSlices) -> tuple[Tensor, Tensor]:
    """Returns the scalar sum and lse [N]."""
    lse, chosen = statistics(x, weight, labels, 0, on_slices)
    return torch.where(labels != ignore_index, lse - chosen + z_loss * lse.square(), 0).sum(), lse


def backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    first: int,
    ignore_index: int,
    z_loss: float,
    needs: Sequence[bool],
    on_slices: OnSlices,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and weight, None where not needed. ∂L/∂logit = (1 + 2 z lse) softmax − onehot(label)."""
    share = torch.where(labels != ignore_index, grad_loss.to(lse.dtype), 0)
    slope = share * (1 + 2 * z_loss * lse)
    total = torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if needs[0] else None
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needs[1] else None
    for words in row_blocks(weight.shape[0], x.shape[0], SLICE_ELEMENTS):
        part = weight[words]
        logits = x @ part.mT
        grad = on_slices.slice_gradient(logits, labels, first + words.start, lse, slope, share, grad=logits)
        if total is not None:
            _add_product(total, grad, part)
        if grad_weight is not None:
            torch.mm(grad.mT, x, out=grad_weight[words])
        del logits, grad  # or two slices would be alive while the next one is made
    return None if total is None else total.to(x.dtype), grad_weight


def forward_scratch_bytes(x: Tensor, weight: Tensor) -> int:
    """Inside `statistics` at its highest, numbers a row aside: a slice of logits."""
    num_rows = x.shape[0]
    return num_rows * min(weight.shape[0], max(1, SLICE_ELEMENTS // max(1, num_rows))) * x.element_size()


def backward_scratch_bytes(x: Tensor, weight: Tensor, needs: Sequence[bool]) -> int:
    """Inside `backward` on CUDA likewise, beside its results: a slice, the sum for x, and a product that is added to it.

    In a dtype that sums itself the sum is the result, and products are added as they are made.
    """
    size = accumulator_dtype(x.dtype).itemsize
    beside_result = x.numel() * (2 * size - x.element_size()) if needs[0] and size > x.element_size() else 0
    return forward_scratch_bytes(x, weight) + beside_result


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, in total's dtype. CUDA multiplies bf16 into fp32; on a CPU the operands are widened."""
    if left.device.type != "cpu" and left.dtype != total.dtype:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total.addmm_(upcast(left), upcast(right))
