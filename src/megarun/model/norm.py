"""The pre-norm every block starts with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megakernels import rms_norm


class RMSNorm(nn.Module):
    """RMS norm over the last dim with a learned scale [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] in and out, in the dtype of x."""
        return rms_norm(x, self.weight, self.eps)


def linear(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """A linear layer with weight [out, in], by default without bias."""
    return nn.Linear(in_features, out_features, bias=bias)
