"""The loop over slices of the vocabulary: products by torch, and slice functions given as an argument.

With g the gradient of a slice's logits, the slice of the weight's gradient is gᵀ x, in one product, and x's is the sum of g W over the
slices. So the loop needs one slice of logits, and an accumulator of x's size.

The weight may itself be a shard of the vocabulary that starts at `first`: then its log-sum-exp is that of the shard, and the caller
combines the shards.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, row_blocks, upcast
from megakernels.ops.linear_cross_entropy import facts


class OnSlices(Protocol):
    """`megakernels.ops.cross_entropy.kernel`, or `reference` in this folder."""

    def join_slice(self, logits: Tensor, labels: Tensor, first: int, lse: Tensor, chosen: Tensor) -> None:
        """Adds a slice to the statistics of each row, in place."""

    def slice_gradient(self, logits: Tensor, labels: Tensor, first: int, lse: Tensor, slope: Tensor, share: Tensor, grad: Tensor) -> Tensor:
        """exp(logits − lse) · slope, minus share at each row's label, into `grad`."""


def statistics(x: Tensor, weight: Tensor, labels: Tensor, first: int, on_slices: OnSlices) -> tuple[Tensor, Tensor]:
    """Returns lse [N] of the weight's rows and the label's logit [N] if it is among them, else 0."""
    num_rows = x.shape[0]
    lse = torch.full((num_rows,), -torch.inf, dtype=accumulator_dtype(x.dtype), device=x.device)
    chosen = torch.zeros_like(lse)
    for words in row_blocks(weight.shape[0], num_rows, facts.LOGITS_SLICE_ELEMENTS):
        on_slices.join_slice(x @ weight[words].mT, labels, first + words.start, lse, chosen)
    return lse, chosen


def forward(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, z_loss: float, on_slices: OnSlices) -> tuple[Tensor, Tensor]:
    """Returns the scalar sum and lse [N]."""
    lse, chosen = statistics(x, weight, labels, 0, on_slices)
    return torch.where(labels != ignore_index, lse - chosen + z_loss * lse.square(), 0).sum(), lse


def backward(
    grad_loss: Tensor, x: Tensor, weight: Tensor, labels: Tensor, lse: Tensor,
    first: int, ignore_index: int, z_loss: float, needs: Sequence[bool], on_slices: OnSlices,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of x and weight, None where not needed. ∂L/∂logit = (1 + 2 z lse) softmax − onehot(label)."""
    share = torch.where(labels != ignore_index, grad_loss.to(lse.dtype), 0)
    slope = share * (1 + 2 * z_loss * lse)
    total = torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if needs[0] else None
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needs[1] else None
    for words in row_blocks(weight.shape[0], x.shape[0], facts.LOGITS_SLICE_ELEMENTS):
        part = weight[words]
        logits = x @ part.mT
        grad = on_slices.slice_gradient(logits, labels, first + words.start, lse, slope, share, grad=logits)
        if total is not None:
            _add_product(total, grad, part)
        if grad_weight is not None:
            torch.mm(grad.mT, x, out=grad_weight[words])
        del logits, grad  # else two slices would be alive at a time
    return None if total is None else total.to(x.dtype), grad_weight


def forward_scratch_bytes(x: Tensor, weight: Tensor) -> int:
    """Peak scratch bytes of `statistics`, without per-row values: a slice of logits."""
    return x.shape[0] * facts.slice_columns(x.shape[0], weight.shape[0]) * x.element_size()


def backward_scratch_bytes(x: Tensor, weight: Tensor, needs: Sequence[bool]) -> int:
    """Peak scratch bytes of `backward` on CUDA, in addition to its results: a slice, the sum for x, and a product added to it.

    If x has the accumulation dtype, the sum is the result, and products are accumulated directly.
    """
    size = accumulator_dtype(x.dtype).itemsize
    extra_sum = x.numel() * (2 * size - x.element_size()) if needs[0] and size > x.element_size() else 0
    return forward_scratch_bytes(x, weight) + extra_sum


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, in total's dtype. CUDA multiplies bf16 into fp32; on a CPU the operands are widened."""
    if left.device.type != "cpu" and left.dtype != total.dtype:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total.addmm_(upcast(left), upcast(right))
