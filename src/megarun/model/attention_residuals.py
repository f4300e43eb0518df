"""Attention residuals: a weighted sum of the results of earlier blocks, which a block or the last norm reads."""

import torch
from torch import Tensor, nn

from megakernels import attend_depth


class DepthAttention(nn.Module):
    """The learned query of one reader and the scale of the norm of the scored values, [width] each."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.query, self.scale = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        """The input and earlier values, [B, t, h] each -> their weighted sum, [B, t, h]."""
        return attend_depth(values, self.query, self.scale, self.eps)
