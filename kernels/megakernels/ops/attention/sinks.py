"""Sinks: a score a head in the denominator of its softmax, with no key and no value.

With lse = log Σ exp s over the keys and a sink z, out is scaled by exp(lse − lse'), lse' = log(exp lse + exp z). A backward that makes
p = exp(s − lse') has the gradients of q, k and v as without sinks; with δ = Σ ∂L/∂out ⊙ out: ∂L/∂z = −Σ exp(z − lse') δ over sequences and
positions.

Source: gpt-oss, arXiv:2508.10925, section 2.1; off-by-one attention, arXiv:2309.17453, section 3.3.
"""

import torch
from torch import Tensor

from megakernels._common import require, upcast


def require_sinks(operation: str, sinks: Tensor | None, q: Tensor) -> None:
    """Refuse sinks that are not one for each head of q [B, T, Hq, D].

    Raises:
        ValueError: Shapes do not fit.
    """
    shape = None if sinks is None else sinks.shape
    require(shape is None or shape == q.shape[2:3], operation, "sinks must be [Hq]", q=q.shape, sinks=shape)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out [B, T, H, Dv] of attention without sinks, changed in place, and lse [B, H, T], overwritten; returns out and the new lse."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, _per_head(sinks))
    out.mul_(lse.sub_(total).exp_().transpose(1, 2).unsqueeze(-1))
    return out, total


def sinks_gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """∂L/∂z [H] in the dtype of sinks, of δ and lse [B, H, T]."""
    return (_per_head(sinks) - lse).exp_().mul_(delta).sum((0, 2)).neg_().to(sinks.dtype)


def gradient_of_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """`sinks_gradient` from the gradient of out; None without sinks."""
    if sinks is None:
        return None
    return sinks_gradient((upcast(grad_out) * upcast(out)).sum(-1).transpose(1, 2), lse, sinks)


def _per_head(sinks: Tensor) -> Tensor:
    return upcast(sinks).view(1, -1, 1)
