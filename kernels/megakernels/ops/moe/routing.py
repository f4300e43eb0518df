"""The router."""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, join, only_needed, require
from megakernels.ops.moe import reference


def route(x: Tensor, weight: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses each token's experts: fp32 logits, softmax over all experts, the k largest.

    Args:
        x: [N, h].
        weight: [E, h].
        top_k: k, experts per token.
        normalize: whether a token's k weights are divided by their sum.

    Returns:
        weights fp32 [N, k] in descending order, indices int32 [N, k], and probs fp32 [N, E] (fp64 for fp32 where x is fp64). Indices and
        probs have no gradient.

    Saves:
        probs: as returned.
        indices: as returned.

    Raises:
        ValueError: shapes do not fit, or top_k is not in 1 … E.

    Source: arXiv:2401.04088, section 2.1; fp32 routing, arXiv:2101.03961, section 2.4.
    """
    require(
        x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1],
        "route",
        "x must be [N,h], weight [E,h]",
        x=x.shape,
        weight=weight.shape,
    )
    require(1 <= top_k <= weight.shape[0], "route", "top_k must be in 1 … E", top_k=top_k, E=weight.shape[0])
    weights, indices, probs = _route(x, weight, top_k, normalize)
    return weights, indices, probs


@custom_op("megakernels::route", mutates_args=())
def _route(x: Tensor, weight: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    return reference.route_forward(x, weight, top_k, normalize)


@custom_op("megakernels::route_backward", mutates_args=())
def _route_backward(
    grad_weights: Tensor, x: Tensor, weight: Tensor, probs: Tensor, indices: Tensor, normalize: bool, needs: list[bool]
) -> list[Tensor]:
    return only_needed(reference.route_backward(grad_weights, x, weight, probs, indices, normalize, needs))


@_route.register_fake
def _(x: Tensor, weight: Tensor, top_k: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulator_dtype(x.dtype)
    chosen = (x.shape[0], top_k)
    return x.new_empty(chosen, dtype=dtype), x.new_empty(chosen, dtype=torch.int32), x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


join(_route, _route_backward, outputs=("weights", "indices", "probs"), gradients=("x", "weight"))
