"""A gated norm over rows whose width the TP group has cut: R's, which normalises all heads together.

Each rank sums its squares, the group adds them (one fp32 number a token, forward and backward), and each rank scales its own part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megakernels import gated_dot, gated_rms_norm, gated_scale, gated_scale_gradients, gated_square_sum
from megarun.parallel.groups.tensor import TensorParallel


def row_gated_rms_norm(tp: TensorParallel, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x · silu(gate) over whole rows of width D.

    Args:
        tp: Who holds the other parts of each row.
        x: [..., D / tp].
        gate: [..., D / tp].
        weight: [D / tp].
        eps: Added to the mean square.

    Returns:
        [..., D / tp].
    """
    if tp.degree == 1:
        return gated_rms_norm(x, gate, weight, eps, 1)
    y: Tensor = _RowNorm.apply(tp, x, gate, weight, eps)  # type: ignore[no-untyped-call]
    return y


class _RowNorm(torch.autograd.Function):
    """Keeps x, gate and rstd, as the op on whole rows does."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., D / tp] in and out."""
        width = tp.degree * x.shape[-1]
        rstd = tp.sum(gated_square_sum(x, gate)).div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.tp = tp
        return gated_scale(x, gate, weight, rstd)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, gate and weight."""
        x, gate, weight, rstd = ctx.saved_tensors
        mean_dot = ctx.tp.sum(gated_dot(gradient, x, gate, weight, rstd)).div_(ctx.tp.degree * x.shape[-1])
        return None, *gated_scale_gradients(gradient, x, gate, weight, rstd, mean_dot, [True, True, True]), None
