"""Updates of optimizers in plain torch, without temporary tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def nesterov(momenta: Sequence[Tensor], gradients: Sequence[Tensor], updates: Sequence[Tensor], keep: float, scale: float) -> None:
    """Moves the momenta, and writes the updates."""
    for momentum, gradient, update in zip(momenta, gradients, updates, strict=True):
        if scale == 1.0 and gradient.dtype is momentum.dtype:
            momentum.lerp_(gradient, 1 - keep)
        else:
            momentum.mul_(keep).add_(gradient, alpha=(1 - keep) * scale)
        torch.add(momentum, gradient, alpha=(1 - keep) / keep * scale, out=update)


def decayed_add(weights: Sequence[Tensor], updates: Sequence[Tensor], decay: float, rates: Sequence[float]) -> None:
    """Decays the weights, and subtracts the updates."""
    for weight, update, rate in zip(weights, updates, rates, strict=True):
        weight.mul_(decay).add_(update, alpha=-rate)


def adamw(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], steps: Sequence[Tensor],
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, scale: float,
) -> None:  # fmt: skip
    """Updates weights and averages, whose steps are counted already; gradients are scaled in place."""
    if scale != 1.0:
        torch._foreach_mul_(list(gradients), scale)
    torch._fused_adamw_(
        list(weights), list(gradients), list(first), list(second), [], list(steps),
        amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
    )  # fmt: skip
