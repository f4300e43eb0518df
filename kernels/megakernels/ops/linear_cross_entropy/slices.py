"""The loop over slices of the vocabulary: products and slice functions are arguments.

With g the gradient of a slice's logits, the slice of the weight's gradient is gᵀ x, in one product, and x's is the sum of g W over the
slices. So the loop needs one slice of logits, and an accumulator of x's size.

The weight may itself be a shard of the vocabulary that starts at `first`: then its log-sum-exp is the shard's, and the caller
combines the shards.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, chooses_triton
from megakernels.ops.linear_cross_entropy import facts
from megakernels.ops.linear_cross_entropy.products import Products, Wide


class OnSlices(Protocol):
    """`megakernels.ops.cross_entropy.kernel`, or `reference` in this folder."""

    def join_slice(self, logits: Tensor, labels: Tensor, first: int, lse: Tensor, chosen: Tensor) -> None:
        """Adds a slice to the statistics of each row, in place."""

    def slice_gradient(self, logits: Tensor, labels: Tensor, first: int, lse: Tensor, slope: Tensor, share: Tensor, grad: Tensor) -> Tensor:
        """exp(logits − lse) · slope, minus share at each row's label, into `grad`."""


def statistics(x: Tensor, weight: Tensor, labels: Tensor, first: int, on_slices: OnSlices, products: Products) -> tuple[Tensor, Tensor]:
    """Returns lse [N] of the weight's rows and the label's logit [N] if it is among them, else 0."""
    num_rows = x.shape[0]
    lse = torch.full((num_rows,), -torch.inf, dtype=accumulator_dtype(x.dtype), device=x.device)
    chosen = torch.zeros_like(lse)
    for words in _slices(x, weight, products):
        on_slices.join_slice(products.logits(weight[words]), labels, first + words.start, lse, chosen)
    return lse, chosen


def forward(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, z_loss: float, on_slices: OnSlices, products: Products
) -> tuple[Tensor, Tensor]:
    """Returns the scalar sum and lse [N]."""
    lse, chosen = statistics(x, weight, labels, 0, on_slices, products)
    return torch.where(labels != ignore_index, lse - chosen + z_loss * lse.square(), 0).sum(), lse


def backward(
    grad_loss: Tensor, x: Tensor, weight: Tensor, labels: Tensor, lse: Tensor,
    first: int, ignore_index: int, z_loss: float, needs: Sequence[bool], on_slices: OnSlices, products: Products,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of x and weight, None where not needed. ∂L/∂logit = (1 + 2 z lse) softmax − onehot(label)."""
    share = torch.where(labels != ignore_index, grad_loss.to(lse.dtype), 0)
    slope = share * (1 + 2 * z_loss * lse)
    total = torch.zeros(x.shape, dtype=lse.dtype, device=x.device) if needs[0] else None
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needs[1] else None
    for words in _slices(x, weight, products):
        part = weight[words]
        logits = products.logits(part)
        grad = on_slices.slice_gradient(logits, labels, first + words.start, lse, slope, share, grad=logits)
        if total is not None:
            products.add(total, grad, part)
        if grad_weight is not None:
            products.outer(grad, grad_weight[words])
        del logits, grad  # otherwise two slices would be allocated at the same time
    return None if total is None else total.to(x.dtype), grad_weight


def _slices(x: Tensor, weight: Tensor, products: Products) -> Iterator[slice]:
    """Slices of the vocabulary."""
    vocab, columns = weight.shape[0], facts.slice_columns(x.shape[0], weight.shape[0], scaled=not isinstance(products, Wide))
    for start in range(0, vocab, columns):
        yield slice(start, min(start + columns, vocab))


def forward_scratch_bytes(x: Tensor, weight: Tensor, scaling: str = "") -> int:
    """Peak scratch bytes of `statistics`, without per-row values: a slice of logits, and in fewer bits the operands."""
    if scaling:
        return _scaled(x, weight, scaling).forward_bytes
    return x.shape[0] * facts.slice_columns(x.shape[0], weight.shape[0]) * x.element_size()


def backward_scratch_bytes(x: Tensor, weight: Tensor, needs: Sequence[bool], scaling: str = "") -> int:
    """Peak scratch bytes of `backward` on CUDA, in addition to its results: a slice, the sum for x, and a product added to it.

    If x has the accumulation dtype, the sum is the result, and products are accumulated directly.
    """
    if scaling:
        return _scaled(x, weight, scaling).backward_bytes
    size = accumulator_dtype(x.dtype).itemsize
    extra_sum = x.numel() * (2 * size - x.element_size()) if needs[0] and size > x.element_size() else 0
    return forward_scratch_bytes(x, weight) + extra_sum


def _scaled(x: Tensor, weight: Tensor, scaling: str) -> facts.ScaledHead:
    return facts.ScaledHead(x.shape[0], x.shape[1], weight.shape[0], x.element_size(), scaling, chooses_triton(x))
