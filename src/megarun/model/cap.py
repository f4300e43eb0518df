"""A soft cap: x becomes c · tanh(x / c)."""

from typing import Any

import torch
from torch import Tensor


class _Capped(torch.autograd.Function):
    """Saves its output: with y = c · tanh(x / c), ∂y/∂x = 1 − (y / c)²."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        """Return logits of the same shape."""
        y = torch.div(x, cap).tanh_().mul_(cap)
        ctx.save_for_backward(y)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of x."""
        (y,) = ctx.saved_tensors
        return torch.div(y, ctx.cap).square_().neg_().add_(1).mul_(gradient), None


def capped(x: Tensor, cap: float) -> Tensor:
    """Values between −cap and cap, close to x near zero.

    Source: arXiv:2408.00118, section 2.
    """
    y: Tensor = _Capped.apply(x, cap)  # type: ignore[no-untyped-call]
    return y
