"""What is done to a slice of logits, in plain torch."""

import torch
from torch import Tensor

from megakernels.ops.cross_entropy import reference


def join_slice(logits: Tensor, labels: Tensor, first: int, lse: Tensor, chosen: Tensor) -> None:
    """Adds the words from `first` on to each row's log-sum-exp [N] and, where the label is one of them, takes its logit [N]; in place."""
    slice_lse, slice_chosen = reference.slice_forward(logits, labels, first)
    torch.logaddexp(lse, slice_lse, out=lse)
    chosen += slice_chosen


def slice_gradient(logits: Tensor, labels: Tensor, first: int, lse: Tensor, slope: Tensor, share: Tensor, grad: Tensor) -> Tensor:
    """exp(logits − lse) · slope, less share at each row's label, into `grad`, which may be the logits [N, W] themselves."""
    inside = (labels >= first) & (labels < first + logits.shape[1])
    column = torch.where(inside, labels - first, 0)
    return grad.copy_(reference.slice_gradient(logits, column, lse, slope, torch.where(inside, share, 0)))
