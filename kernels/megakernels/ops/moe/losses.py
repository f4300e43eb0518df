"""Router losses: load balance over the experts, and size of the logits.

A block's own loss need not be passed to the end of a pipeline: it has gradient 1, independent of the model's gradient, and enters the
backward at the block's routing weights. The caller's factors include the coefficients and all means, so that the contributions of all
tokens, microbatches, layers and ranks are summed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import join, only_needed, require
from megakernels._common.device import module_for
from megakernels.ops.moe import reference

DTYPES = (torch.float32,)
"""Dtypes of routing weights that the kernels accept."""


def router_losses(weights: Tensor, probs: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float) -> tuple[Tensor, Tensor]:
    """Add the gradients of two losses to those of the routing weights.

    The balance loss is balance · Σ load[b, e] · probs[n, e] over the tokens n of each sequence b and all experts e; the z-loss z · Σ
    log_sums². With balance = α · E / (k · T² · B) the first is α times the mean over B sequences of E · Σ f P: f an expert's share of the
    rows, P its mean probability.

    Args:
        weights: fp32 [N, k] of `route_scored`, as are the next two.
        probs: fp32 [N, E].
        log_sums: fp32 [N].
        load: int32 [B, E], of full sequences, including tokens on other ranks.
        balance: factor of the balance loss.
        z: factor of the z-loss.

    Returns:
        The weights, and fp32 [2]: the balance loss and the z-loss of these tokens, without gradient.

    Triton:
        One kernel forward, whose shares of the losses are summed, one backward.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2412.19437, equations 17 to 20; arXiv:2202.08906, equation 5.
    """
    fits = weights.dim() == probs.dim() == load.dim() == 2 and probs.shape[1] == load.shape[1] and probs.shape[0] % load.shape[0] == 0
    fits = fits and weights.shape[:1] == probs.shape[:1] == log_sums.shape
    what = "weights must be [N,k], probs [N,E], log_sums [N], load [B,E], and B divide N"
    require(fits, "router_losses", what, weights=weights.shape, probs=probs.shape, log_sums=log_sums.shape, load=load.shape)
    weighted, values = _router_losses(weights, probs, log_sums, load, balance, z)
    return weighted, values


@custom_op("megakernels::router_losses", mutates_args=())
def _router_losses(weights: Tensor, probs: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float) -> tuple[Tensor, Tensor]:
    module = module_for(weights, reference, "kernel_losses", DTYPES)
    result: tuple[Tensor, Tensor] = module.router_losses_forward(weights, probs, log_sums, load, balance, z)
    return result


@custom_op("megakernels::router_losses_backward", mutates_args=())
def _router_losses_backward(
    grad_weighted: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float, needs: list[bool]
) -> list[Tensor]:
    module = module_for(grad_weighted, reference, "kernel_losses", DTYPES)
    return only_needed(module.router_losses_backward(grad_weighted, log_sums, load, balance, z, needs))


@_router_losses.register_fake
def _(weights: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return weights.new_empty(weights.shape), weights.new_empty((2,))


@_router_losses_backward.register_fake
def _(grad_weighted: Tensor, log_sums: Tensor, load: Tensor, _balance: float, _z: float, needs: list[bool]) -> list[Tensor]:
    shapes = (grad_weighted.shape, (log_sums.shape[0], load.shape[1]), log_sums.shape)
    return [log_sums.new_empty(shape) for shape, need in zip(shapes, needs, strict=True) if need]


join(_router_losses, _router_losses_backward, outputs=("weighted", "values"), gradients=("weights", "probs", "log_sums"))
