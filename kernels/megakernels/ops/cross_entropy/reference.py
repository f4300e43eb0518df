"""Cross entropy in plain torch over blocks of rows, so that the fp32 copy of the logits stays bounded.

loss = Σ lse(z) − z[label] over the rows whose label is not ignored; ∂L/∂z = softmax(z) − onehot(label), zero on the other rows.
"""

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, row_blocks, upcast
from megakernels.ops.cross_entropy.facts import PLAIN_LOGITS


def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Returns the scalar sum and lse [N]."""
    counts = labels != ignore_index
    lse, chosen = _statistics(logits, torch.where(counts, labels, 0))
    return torch.where(counts, lse - chosen, 0).sum(), lse


def backward(grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    """Returns the gradient of the logits [N, V] in their dtype."""
    counts = labels != ignore_index
    share = torch.where(counts, grad_loss.to(lse.dtype), 0)
    return slice_gradient(logits, torch.where(counts, labels, 0), lse, share, share)


def slice_forward(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Returns lse [N] of the columns from `first` and the label's logit [N], 0 if the label is not among them."""
    inside = (labels >= first) & (labels < first + logits.shape[1])
    lse, chosen = _statistics(logits, torch.where(inside, labels - first, 0))
    return lse, chosen.masked_fill_(~inside, 0)


def slice_backward(grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignore_index: int) -> Tensor:
    """Returns the gradient of the logits [N, V / n], columns from `first`, in their dtype; `lse` is over the full vocabulary."""
    inside = (labels >= first) & (labels < first + logits.shape[1])
    share = torch.where(labels != ignore_index, grad_loss.to(lse.dtype), 0)
    return slice_gradient(logits, torch.where(inside, labels - first, 0), lse, share, torch.where(inside, share, 0))


def _statistics(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Lse [N], and the logit [N] of each row's column [N]."""
    num_rows, vocabulary = logits.shape
    lse = torch.empty(num_rows, dtype=accumulator_dtype(logits.dtype), device=logits.device)
    chosen = torch.empty_like(lse)
    for rows in row_blocks(num_rows, vocabulary, PLAIN_LOGITS):
        block = upcast(logits[rows])
        lse[rows] = torch.logsumexp(block, dim=1)
        chosen[rows] = block.gather(1, column[rows].unsqueeze(1)).squeeze(1)
    return lse, chosen


def slice_gradient(logits: Tensor, column: Tensor, lse: Tensor, slope: Tensor, share: Tensor) -> Tensor:
    """exp(logits − lse) · slope, minus share at each row's column; `column`, `lse`, `slope`, `share`: [N]."""
    num_rows, vocabulary = logits.shape
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for rows in row_blocks(num_rows, vocabulary, PLAIN_LOGITS):
        block = (upcast(logits[rows]) - lse[rows].unsqueeze(1)).exp_().mul_(slope[rows].unsqueeze(1))
        grad[rows] = block.scatter_add_(1, column[rows].unsqueeze(1), -share[rows].unsqueeze(1))
    return grad
