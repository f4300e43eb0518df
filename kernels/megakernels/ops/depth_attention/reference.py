"""Attention over depth in plain torch.

With u = query · scale and r = 1 / rms(value), the score of a value is r · (u · value); the weights are the softmax of the scores over the
values of one token. Sums over values are added one by one in the accumulation dtype, so that the values are never copied into one tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, upcast


def attend(values: Sequence[Tensor], query: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum [..., h], scores and 1 / rms of each value [..., n]."""
    lead, width, dtype = values[0].shape[:-1], values[0].shape[-1], accumulator_dtype(values[0].dtype)
    scores, rstd = (values[0].new_empty((*lead, len(values)), dtype=dtype) for _ in range(2))
    direction = (upcast(query) * upcast(scale)).to(values[0].dtype)
    for index, value in enumerate(values):
        norm = torch.linalg.vector_norm(value, dim=-1, dtype=dtype)
        rstd[..., index] = (norm.square_() / width + eps).rsqrt_()
        scores[..., index] = _product(value, direction)
    scores *= rstd
    weights = torch.softmax(scores, -1)
    made = values[0].new_empty(values[0].shape)
    made.copy_(_weighted(values, weights))
    return made, scores, rstd


def attend_backward(
    grad: Tensor, values: Sequence[Tensor], query: Tensor, scale: Tensor, scores: Tensor, rstd: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of each value, of query and of scale; None for those that are not needed."""
    count, width = len(values), values[0].shape[-1]
    weights, slopes = torch.softmax(scores, -1), torch.empty_like(scores)
    for index, value in enumerate(values):
        slopes[..., index] = _rowwise(value, grad)
    slopes -= (slopes * weights).sum(-1, keepdim=True)
    slopes *= weights
    results: list[Tensor | None] = [None] * (count + 2)
    wide = upcast(query) * upcast(scale)
    if any(needs[count:]):
        turned = (slopes * rstd).to(values[0].dtype)
        total = torch.zeros_like(wide)
        for index, value in enumerate(values):
            total += (turned[..., index].flatten() @ value.flatten(0, -2)).to(total.dtype)
        results[count] = (total * upcast(scale)).to(query.dtype) if needs[count] else None
        results[count + 1] = (total * upcast(query)).to(scale.dtype) if needs[count + 1] else None
    wide = wide.to(values[0].dtype).to(wide.dtype)  # unit vectors from which the scores were computed
    along = slopes * scores * rstd.square() / -width
    slopes *= rstd
    for index, value in enumerate(values):
        if needs[index]:
            one = weights[..., index, None] * grad
            one.addcmul_(slopes[..., index, None], wide).addcmul_(along[..., index, None], value)
            results[index] = made = value.new_empty(value.shape)
            made.copy_(one)
            del one
    return results


def _weighted(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Σ weights[..., i] · values[i] in the accumulation dtype."""
    total = values[0] * weights[..., 0, None]
    for index in range(1, len(values)):
        total.addcmul_(values[index], weights[..., index, None])
    return total


def _product(value: Tensor, direction: Tensor) -> Tensor:
    """Rows [..., h] · [h] in the accumulation dtype."""
    if value.is_cuda and value.dtype != accumulator_dtype(value.dtype):
        made = torch.mm(value.flatten(0, -2), direction.unsqueeze(-1), out_dtype=accumulator_dtype(value.dtype))
        return made.view(value.shape[:-1])
    return upcast(value) @ upcast(direction)


def _rowwise(value: Tensor, grad: Tensor) -> Tensor:
    """Products of equal rows [..., h] in the accumulation dtype."""
    rows, others = value.flatten(0, -2).unsqueeze(1), grad.flatten(0, -2).unsqueeze(-1)
    dtype = accumulator_dtype(value.dtype)
    made = torch.bmm(rows, others, out_dtype=dtype) if value.is_cuda and value.dtype != dtype else upcast(rows) @ upcast(others)
    return made.view(value.shape[:-1])
