"""Slice functions of the loss in plain torch."""

import torch
from torch import Tensor

from megakernels.ops.cross_entropy import reference


def join_slice(logits: Tensor, labels: Tensor, first: int, lse: Tensor, chosen: Tensor) -> None:
    """Adds the columns from `first` to each row's log-sum-exp [N] and reads the label's logit [N] if it is among them; in place."""
    slice_lse, slice_chosen = reference.slice_forward(logits, labels, first)
    torch.logaddexp(lse, slice_lse, out=lse)
    chosen += slice_chosen


def slice_gradient(logits: Tensor, labels: Tensor, first: int, lse: Tensor, slope: Tensor, share: Tensor, grad: Tensor) -> Tensor:
    """exp(logits − lse) · slope, minus share at each row's label, into `grad`, which may be the logits [N, W]."""
    inside = (labels >= first) & (labels < first + logits.shape[1])
    column = torch.where(inside, labels - first, 0)
    return grad.copy_(reference.slice_gradient(logits, column, lse, slope, torch.where(inside, share, 0)))
