"""Norms over rows whose width is sharded over the TP group: R's gated norm, and the norm over all heads' queries or keys together.

Each rank sums its squares, the group reduces them (one fp32 value per token, forward and backward), and each rank scales its part.
"""

from typing import Any

import torch
from torch import Tensor

from megakernels import (
    gated_dot,
    gated_rms_norm,
    gated_scale,
    gated_scale_gradients,
    gated_square_sum,
    rms_norm,
    row_dot,
    row_gradients,
    row_scale,
    row_square_sum,
)
from megarun.parallel.groups.tensor import TensorParallel


def row_gated_rms_norm(tp: TensorParallel, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x · silu(gate) over full rows of width D.

    Args:
        tp: TP group that shards the rows.
        x: Local part of the input, [..., D / tp].
        gate: Local part of the gate, [..., D / tp].
        weight: Local part of the scale, [D / tp].
        eps: Constant added to the mean square.

    Returns:
        [..., D / tp].
    """
    if tp.degree == 1:
        return gated_rms_norm(x, gate, weight, eps, 1)
    y: Tensor = _GatedRowNorm.apply(tp, x, gate, weight, eps)  # type: ignore[no-untyped-call]
    return y


class _GatedRowNorm(torch.autograd.Function):
    """Saves x, gate and rstd, as the op on full rows."""

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
        """Gradients of x, gate and weight."""
        x, gate, weight, rstd = ctx.saved_tensors
        mean_dot = ctx.tp.sum(gated_dot(gradient, x, gate, weight, rstd)).div_(ctx.tp.degree * x.shape[-1])
        needs_weight: bool = ctx.needs_input_grad[3]
        made = gated_scale_gradients(gradient, x, gate, weight, rstd, mean_dot, [True, True, needs_weight])
        return None, *made, *([] if needs_weight else [None]), None


def row_rms_norm(tp: TensorParallel, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over full rows of width D.

    Args:
        tp: TP group that shards the rows.
        x: Local part of the input, [..., D / tp].
        weight: Local part of the scale, [D / tp].
        eps: Constant added to the mean square.

    Returns:
        [..., D / tp].
    """
    if tp.degree == 1:
        return rms_norm(x, weight, eps)
    y: Tensor = _RowNorm.apply(tp, x, weight, eps)  # type: ignore[no-untyped-call]
    return y


class _RowNorm(torch.autograd.Function):
    """Saves x and rstd, as the op on full rows."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., D / tp] in and out."""
        rstd = tp.sum(row_square_sum(x)).div_(tp.degree * x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.tp = tp
        return row_scale(x, weight, rstd)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight."""
        x, weight, rstd = ctx.saved_tensors
        mean_dot = ctx.tp.sum(row_dot(gradient, x, weight, rstd)).div_(ctx.tp.degree * x.shape[-1])
        needs_weight: bool = ctx.needs_input_grad[2]
        made = row_gradients(gradient, x, weight, rstd, mean_dot, [True, needs_weight])
        return None, *made, *([] if needs_weight else [None]), None
