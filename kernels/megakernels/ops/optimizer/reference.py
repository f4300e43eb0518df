"""Updates of optimizers in plain torch, without temporary tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def nesterov(momenta: Sequence[Tensor], gradients: Sequence[Tensor], updates: Sequence[Tensor], keep: float, scale: Tensor) -> None:
    """Moves the momenta, and writes the updates."""
    for momentum, gradient, update in zip(momenta, gradients, updates, strict=True):
        momentum.mul_(keep).addcmul_(gradient, scale, value=1 - keep)
        torch.addcmul(momentum, gradient, scale, value=(1 - keep) / keep, out=update)


def decayed_add(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: Tensor, weight_decay: float, factors: Sequence[float]) -> None:
    """Decays the weights, and subtracts the updates."""
    decay = 1 - rate * weight_decay
    for weight, update, factor in zip(weights, updates, factors, strict=True):
        weight.mul_(decay).addcmul_(update, rate, value=-factor)


def adamw(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], steps: Sequence[Tensor],
    lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, scale: Tensor,
) -> None:  # fmt: skip
    """Updates weights and averages, whose steps are counted already; gradients are scaled in place."""
    torch._foreach_mul_(list(gradients), scale)
    torch._fused_adamw_(
        list(weights), list(gradients), list(first), list(second), [], list(steps),
        amsgrad=False, maximize=False, lr=lr.float() if lr.is_cuda else lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
    )  # fmt: skip
