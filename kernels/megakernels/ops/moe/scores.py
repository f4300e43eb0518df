"""The router in plain torch: scores, the choice of experts, their weights, with explicit backward formulas.

Source: softmax before top-k with renormalised weights as in Mixtral, arXiv:2401.04088, section 2.1; sigmoid scores and groups of experts,
DeepSeek-V3, arXiv:2412.19437, equations 12 to 16 and section 2.1.2; numbers added for the choice alone, arXiv:2408.15664; groups by their
best softmax score, DeepSeek-V2, arXiv:2405.04434, section 2.2.2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common import upcast

BEST_OF_GROUP = 2
"""Sigmoid scores of a group's best experts that are summed to judge it."""


class Router(NamedTuple):
    """The arguments of `route`, as it documents them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    top_k: int
    normalize: bool
    num_groups: int
    top_groups: int
    scale: float


def logits_of(given: Router) -> Tensor:
    """[N, E] in the accumulation dtype."""
    logits = upcast(given.x) @ upcast(given.weight).mT
    return logits if given.bias is None else logits + upcast(given.bias)


def choose(scores: Tensor, given: Router, *, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """The weights [N, k] and experts int32 [N, k] of scores [N, E], in descending order of the corrected scores."""
    ranked = scores if given.correction is None else scores + given.correction.to(scores.dtype)
    if given.num_groups > 1:
        groups = torch.unflatten(ranked, 1, (given.num_groups, ranked.shape[1] // given.num_groups))
        value = groups.topk(BEST_OF_GROUP, -1).values.sum(-1) if sigmoid else groups.amax(-1)
        left = torch.ones_like(value, dtype=torch.bool).scatter_(1, value.topk(given.top_groups, -1).indices, False)
        ranked = groups.masked_fill(left.unsqueeze(-1), float("-inf")).flatten(1)
    indices = torch.topk(ranked, given.top_k, dim=-1).indices
    chosen = scores.gather(1, indices)
    weights = chosen / chosen.sum(-1, keepdim=True) if given.normalize else chosen
    return weights if given.scale == 1.0 else weights * given.scale, indices.to(torch.int32)


def route_forward(given: Router, num_sequences: int | None, *, is_sigmoid: bool) -> tuple[Tensor, ...]:
    """Returns weights, indices, probs and logits; with sequences also each token's log-sum-exp and the sequences' loads."""
    made = (sigmoid_forward if is_sigmoid else softmax_forward)(given)
    if num_sequences is None:
        return made
    return *made, torch.logsumexp(made[3], dim=-1), loads(made[1], num_sequences, given.weight.shape[0])


def route_backward(
    grads: tuple[Tensor, Tensor | None, Tensor | None],
    given: Router,
    kept: Tensor,
    indices: Tensor,
    needs: Sequence[bool],
    *,
    is_sigmoid: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and correction, from those of weights, and of probs and log-sum-exps or None."""
    backward = sigmoid_backward if is_sigmoid else softmax_backward
    return parameters_backward(backward(grads[0], given, kept, indices, *grads[1:]), given, needs)


def softmax_forward(given: Router) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns weights, indices, probs [N, E] and logits [N, E]."""
    logits = logits_of(given)
    probs = torch.softmax(logits, dim=-1)
    return *choose(probs, given, sigmoid=False), probs, logits


def sigmoid_forward(given: Router) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns weights, indices, each token's scores over their sum [N, E], and logits [N, E]."""
    logits = logits_of(given)
    scores = torch.sigmoid(logits)
    weights, indices = choose(scores, given, sigmoid=True)
    return weights, indices, scores.div_(scores.sum(-1, keepdim=True)), logits


def softmax_backward(
    grad_weights: Tensor, given: Router, probs: Tensor, indices: Tensor, grad_probs: Tensor | None, grad_log_sums: Tensor | None
) -> Tensor:
    """The gradient of the logits [N, E]; ∂ log Σ exp / ∂ logits = probs."""
    grad = _chosen_backward(grad_weights, probs, indices, given)
    if grad_probs is not None:
        grad += grad_probs
    grad = probs * (grad - (grad * probs).sum(-1, keepdim=True))
    return grad if grad_log_sums is None else grad + grad_log_sums.unsqueeze(1) * probs


def sigmoid_backward(
    grad_weights: Tensor, given: Router, logits: Tensor, indices: Tensor, grad_probs: Tensor | None, grad_log_sums: Tensor | None
) -> Tensor:
    """The gradient of the logits [N, E]. With p = s / Σs: ∂L/∂s = (∂L/∂p − Σ ∂L/∂p · p) / Σs."""
    scores = torch.sigmoid(logits)
    grad = _chosen_backward(grad_weights, scores, indices, given)
    if grad_probs is not None:
        total = scores.sum(-1, keepdim=True)
        grad += (grad_probs - (grad_probs * scores).sum(-1, keepdim=True) / total) / total
    grad = grad * scores * (1 - scores)
    return grad if grad_log_sums is None else grad + grad_log_sums.unsqueeze(1) * torch.softmax(logits, dim=-1)


def _chosen_backward(grad_weights: Tensor, scores: Tensor, indices: Tensor, given: Router) -> Tensor:
    """The gradient of scores [N, E]. With w = s / Σs over the chosen: ∂L/∂s = (∂L/∂w − Σ ∂L/∂w · w) / Σs."""
    slots = indices.long()
    grad_chosen = upcast(grad_weights)
    if given.scale != 1.0:
        grad_chosen = grad_chosen * given.scale
    if given.normalize:
        chosen = scores.gather(1, slots)
        total = chosen.sum(-1, keepdim=True)
        grad_chosen = (grad_chosen - (grad_chosen * chosen / total).sum(-1, keepdim=True)) / total
    return torch.zeros_like(scores).scatter_(1, slots, grad_chosen)


def parameters_backward(grad_logits: Tensor, given: Router, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and correction; the correction's is zero, since it only affects the choice."""
    x, weight, bias, correction = given[:4]
    return (
        (grad_logits @ upcast(weight)).to(x.dtype) if needs[0] else None,
        (grad_logits.mT @ upcast(x)).to(weight.dtype) if needs[1] else None,
        grad_logits.sum(0).to(bias.dtype) if bias is not None and needs[2] else None,
        torch.zeros_like(correction) if correction is not None and needs[3] else None,
    )


def loads(indices: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """Rows of each sequence for each expert, int32 [num_sequences, E]."""
    rows = indices.view(num_sequences, -1).long()
    found = torch.zeros(num_sequences, num_experts, dtype=torch.int32, device=indices.device)
    return found.scatter_add_(1, rows, torch.ones_like(rows, dtype=torch.int32))
