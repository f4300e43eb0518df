"""Router losses: load balance over the experts, and size of the logits.

A block's own loss need not be passed to the end of a pipeline: it has gradient 1, independent of the model's gradient, and enters the
backward at the block's routing weights. The caller's factors include the coefficients and all means, so that the contributions of all
tokens, microbatches, layers and ranks are summed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, join, only_needed, require
from megakernels.ops.moe import reference


def route_scored(
    x: Tensor, weight: Tensor, top_k: int, normalize: bool, num_sequences: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`route`, with the inputs of the router losses.

    Args:
        x: [N, h], num_sequences equal runs of rows.
        weight: [E, h].
        top_k: k, experts per token.
        normalize: whether a token's k weights are divided by their sum.
        num_sequences: B, whose loads are counted separately.

    Returns:
        weights fp32 [N, k] in descending order, indices int32 [N, k], probs fp32 [N, E], log Σ exp of the logits fp32 [N], and load int32
        [B, E], a sequence's rows for each expert (fp64 for fp32 where x is fp64). Indices and load have no gradient.

    Saves:
        probs: as returned.
        indices: as returned.

    Raises:
        ValueError: shapes do not fit, or top_k is not in 1 … E.
    """
    require(
        x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1] and num_sequences > 0 and x.shape[0] % num_sequences == 0,
        "route_scored",
        "x must be [N,h], weight [E,h], and num_sequences divide N",
        x=x.shape,
        weight=weight.shape,
        num_sequences=num_sequences,
    )
    require(1 <= top_k <= weight.shape[0], "route_scored", "top_k must be in 1 … E", top_k=top_k, E=weight.shape[0])
    weights, indices, probs, log_sums, load = _route_scored(x, weight, top_k, normalize, num_sequences)
    return weights, indices, probs, log_sums, load


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


@custom_op("megakernels::route_scored", mutates_args=())
def _route_scored(
    x: Tensor, weight: Tensor, top_k: int, normalize: bool, num_sequences: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights, indices, probs, log_sums, load = reference.route_scored_forward(x, weight, top_k, normalize, num_sequences)
    return weights, indices, probs, log_sums, load


@custom_op("megakernels::route_scored_backward", mutates_args=())
def _route_scored_backward(
    grad_weights: Tensor,
    grad_probs: Tensor,
    grad_log_sums: Tensor,
    x: Tensor,
    weight: Tensor,
    probs: Tensor,
    indices: Tensor,
    normalize: bool,
    needs: list[bool],
) -> list[Tensor]:
    grads = reference.route_scored_backward(grad_weights, grad_probs, grad_log_sums, x, weight, probs, indices, normalize, needs)
    return only_needed(grads)


@_route_scored.register_fake
def _(x: Tensor, weight: Tensor, top_k: int, _normalize: bool, num_sequences: int) -> tuple[Tensor, ...]:
    (num_tokens, _), num_experts, dtype = x.shape, weight.shape[0], accumulator_dtype(x.dtype)
    return (
        x.new_empty((num_tokens, top_k), dtype=dtype),
        x.new_empty((num_tokens, top_k), dtype=torch.int32),
        x.new_empty((num_tokens, num_experts), dtype=dtype),
        x.new_empty((num_tokens,), dtype=dtype),
        x.new_empty((num_sequences, num_experts), dtype=torch.int32),
    )


@custom_op("megakernels::router_losses", mutates_args=())
def _router_losses(weights: Tensor, probs: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float) -> tuple[Tensor, Tensor]:
    return reference.router_losses_forward(weights, probs, log_sums, load, balance, z)


@custom_op("megakernels::router_losses_backward", mutates_args=())
def _router_losses_backward(
    grad_weighted: Tensor, log_sums: Tensor, load: Tensor, balance: float, z: float, needs: list[bool]
) -> list[Tensor]:
    return only_needed(reference.router_losses_backward(grad_weighted, log_sums, load, balance, z, needs))


@_router_losses.register_fake
def _(weights: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return weights.new_empty(weights.shape), weights.new_empty((2,))


@_router_losses_backward.register_fake
def _(grad_weighted: Tensor, log_sums: Tensor, load: Tensor, _balance: float, _z: float, needs: list[bool]) -> list[Tensor]:
    shapes = (grad_weighted.shape, (log_sums.shape[0], load.shape[1]), log_sums.shape)
    return [log_sums.new_empty(shape) for shape, need in zip(shapes, needs, strict=True) if need]


join(
    _route_scored,
    _route_scored_backward,
    outputs=("weights", "indices", "probs", "log_sums", "load"),
    gradients=("x", "weight"),
)
join(_router_losses, _router_losses_backward, outputs=("weighted", "values"), gradients=("weights", "probs", "log_sums"))
