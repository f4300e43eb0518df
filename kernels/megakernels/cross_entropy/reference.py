"""Cross entropy in plain torch over blocks of rows, so that the fp32 copy of the logits stays bounded.

loss = Σ lse(z) − z[label] over the rows whose label counts; ∂L/∂z = softmax(z) − onehot(label), zero on the other rows.
"""

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, row_blocks, upcast

SCRATCH_ELEMENTS = 1 << 22
"""Logits held in fp32 at once."""


def forward(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Returns the scalar sum and lse [N]."""
    num_rows, vocabulary = logits.shape
    dtype = accumulator_dtype(logits.dtype)
    lse = torch.empty(num_rows, dtype=dtype, device=logits.device)
    chosen = torch.empty_like(lse)
    counts = labels != ignore_index
    column = torch.where(counts, labels, 0).unsqueeze(1)
    for rows in row_blocks(num_rows, vocabulary, SCRATCH_ELEMENTS):
        block = upcast(logits[rows])
        lse[rows] = torch.logsumexp(block, dim=1)
        chosen[rows] = block.gather(1, column[rows]).squeeze(1)
    return torch.where(counts, lse - chosen, 0).sum(), lse


def backward(grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    """Returns the gradient of the logits [N, V] in their dtype."""
    num_rows, vocabulary = logits.shape
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    counts = labels != ignore_index
    column = torch.where(counts, labels, 0).unsqueeze(1)
    share = torch.where(counts, grad_loss.to(lse.dtype), 0).unsqueeze(1)
    for rows in row_blocks(num_rows, vocabulary, SCRATCH_ELEMENTS):
        block = (upcast(logits[rows]) - lse[rows].unsqueeze(1)).exp_().mul_(share[rows])
        grad[rows] = block.scatter_add_(1, column[rows], -share[rows])
    return grad
