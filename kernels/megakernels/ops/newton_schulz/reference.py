"""The symmetric product in plain torch."""

import torch
from torch import Tensor


def forward(x: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Returns alpha · x xᵀ + beta · added [n, r, r]."""
    if added is not None:
        return torch.baddbmm(added, x, x.mT, beta=beta, alpha=alpha)
    product = x @ x.mT
    return product if alpha == 1.0 else product.mul_(alpha)
