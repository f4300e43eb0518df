"""Hyper-connections in plain torch.

With x the n streams of a token side by side and u = weight · x / rms(x), the logits are scale · u + base, one scale for each kind: pre =
σ + eps, post = post_scale · σ, and comb the doubly stochastic matrix of its logits. Sums over streams are added one by one in the
accumulation dtype, so that no copy of all streams is made.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels._common import accumulator_dtype, upcast
from megakernels.ops.hyper_connection.facts import Connection


class Weights(NamedTuple):
    """Weights of R tokens: pre and post [R, n], comb [R, n, n] (None without), and the divisors of the matrix, with its softmax."""

    pre: Tensor
    post: Tensor
    comb: Tensor | None
    divisors: tuple[Tensor, ...]
    softmax: Tensor | None


def collapse(x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, how: Connection) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum over streams, post and comb side by side, the numbers u, and 1 / rms(x)."""
    x = x.contiguous()
    rows = x.flatten(0, -2)
    rstd = (torch.linalg.vector_norm(x, dim=-1, dtype=accumulator_dtype(x.dtype)).square() / x.shape[-1] + how.norm_eps).rsqrt()
    numbers = _product(x, weight.t()) * rstd.unsqueeze(-1)
    found = _weights(numbers.flatten(0, -2), base, scale, how)
    made = x.new_empty((*x.shape[:-1], x.shape[-1] // how.num_streams))
    made.flatten(0, -2).copy_(_weighted(_streams(rows, how.num_streams), found.pre))
    weights = numbers.new_empty((*x.shape[:-1], numbers.shape[-1] - how.num_streams))
    if len(scale) > 1:
        given = [found.post, *(() if found.comb is None else (found.comb.flatten(1),))]
        torch.cat(given, -1, out=weights.flatten(0, -2))
    return made, weights, numbers, rstd


def collapse_backward(
    grad_made: Tensor,
    grad_weights: Tensor,
    x: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    numbers: Tensor,
    rstd: Tensor,
    how: Connection,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of x, weight, base and scale, None for those that are not needed."""
    rows, grad, n = x.contiguous().flatten(0, -2), grad_made.contiguous().flatten(0, -2), how.num_streams
    numbers, rstd = numbers.flatten(0, -2), rstd.reshape(-1, 1)
    found = _weights(numbers, base, scale, how)
    grad_pre = _batched(_streams(rows, n), grad.unsqueeze(-1)).squeeze(-1)
    logits = _logit_gradients(found, grad_pre, grad_weights.flatten(0, -2), scale, how)
    results: list[Tensor | None] = [None] * 4
    if needs[2]:
        results[2] = logits.sum(0).to(base.dtype)
    if needs[3]:
        kinds = torch.split((logits * numbers).sum(0), _kinds(numbers.shape[-1], len(scale), n))
        results[3] = torch.stack([kind.sum() for kind in kinds]).to(scale.dtype)
    logits *= _scales(scale, numbers.shape[-1], n)
    slope = (logits * numbers).sum(-1, keepdim=True) * rstd.square() / -rows.shape[-1]
    logits = (logits * rstd).to(x.dtype)
    if needs[1]:
        results[1] = (logits.t() @ rows).to(weight.dtype)
    if needs[0]:
        results[0] = made = torch.unflatten(logits, 0, x.shape[:-1]) @ weight.to(x.dtype)
        parts = _streams(made.flatten(0, -2), n)
        for index, stream in enumerate(_streams(rows, n).unbind(1)):
            parts[:, index] += (grad * found.pre[:, index, None]).addcmul_(stream, slope)
    return results


def expand(x: Tensor, made: Tensor, weights: Tensor, factor: float, count: int) -> Tensor:
    """New streams: old ones, mixed if the weights have a matrix, and the block's output times post and a factor."""
    old, own, (post, comb) = _streams(x.flatten(0, -2), count), made.flatten(0, -2), _parts(weights, count)
    new = x.new_empty(x.shape)
    streams = _streams(new.flatten(0, -2), count)
    for index in range(count):
        total = own * (post[:, index, None] * factor)
        if comb is None:
            total += old[:, index]
        else:
            for other in range(count):
                total.addcmul_(old[:, other], comb[:, other, index, None])
        streams[:, index] = total
    return new


def expand_backward(
    grad: Tensor, x: Tensor, made: Tensor, weights: Tensor, factor: float, count: int, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of x, made and weights, None for those that are not needed."""
    old, own, (post, comb) = _streams(x.flatten(0, -2), count), made.flatten(0, -2), _parts(weights, count)
    new = _streams(grad.flatten(0, -2), count)
    results: list[Tensor | None] = [None] * 3
    if needs[0]:
        results[0] = grad_x = x.new_empty(x.shape)
        found = _streams(grad_x.flatten(0, -2), count)
        for index in range(count):
            found[:, index] = new[:, index] if comb is None else _weighted(new, comb[:, index])
    if needs[1]:
        results[1] = grad_made = made.new_empty(made.shape)
        grad_made.flatten(0, -2).copy_(_weighted(new, post * factor))
    if needs[2]:
        of_post = _batched(new, own.unsqueeze(-1)).squeeze(-1) * factor
        both = [of_post] if comb is None else [of_post, _batched(old, new.transpose(1, 2)).flatten(1)]
        results[2] = grad_weights = weights.new_empty(weights.shape)
        torch.cat(both, -1, out=grad_weights.flatten(0, -2))
    return results


def _streams(rows: Tensor, count: int) -> Tensor:
    """Rows [R, n · h] as streams [R, n, h]."""
    return torch.unflatten(rows, -1, (count, -1))


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    """Σ weights[:, i] · streams[:, i] in the accumulation dtype: [R, n, h] and [R, n] -> [R, h]."""
    total = streams[:, 0] * weights[:, 0, None]
    for index in range(1, streams.shape[1]):
        total.addcmul_(streams[:, index], weights[:, index, None])
    return total


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Rows [..., i] · [i, j] in the accumulation dtype."""
    dtype = accumulator_dtype(a.dtype)
    b = b.to(a.dtype)
    if a.is_cuda and a.dtype != dtype:
        return torch.unflatten(torch.mm(a.flatten(0, -2), b, out_dtype=dtype), 0, a.shape[:-1])
    return upcast(a) @ upcast(b)


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products [R, i, h] · [R, h, j] in the accumulation dtype."""
    dtype = accumulator_dtype(a.dtype)
    return torch.bmm(a, b.to(a.dtype), out_dtype=dtype) if a.is_cuda and a.dtype != dtype else upcast(a) @ upcast(b)


def _kinds(numbers: int, factors: int, count: int) -> list[int]:
    """Numbers of each kind: pre, post, the matrix."""
    return [count] * min(factors, 2) + ([numbers - 2 * count] if factors > 2 else [])


def _scales(scale: Tensor, numbers: int, count: int) -> Tensor:
    """The scale of each number."""
    return torch.cat([upcast(one).expand(size) for one, size in zip(scale, _kinds(numbers, len(scale), count), strict=True)])


def _weights(numbers: Tensor, base: Tensor, scale: Tensor, how: Connection) -> Weights:
    n = how.num_streams
    logits = numbers * _scales(scale, numbers.shape[-1], n) + upcast(base)
    post = torch.sigmoid(logits[:, n : 2 * n]) * how.post_scale
    if len(scale) < 3:  # eps as in `pre`, so that no stream is ever left out
        post += how.eps
    softmax, comb, divisors = None, None, list[Tensor]()
    if len(scale) > 2:
        softmax = torch.softmax(torch.unflatten(logits[:, 2 * n :], -1, (n, n)), -1)
        comb = softmax + how.eps
        for dim in _dims(how.steps):
            divisors.append(comb.sum(dim, keepdim=True) + how.eps)
            comb = comb / divisors[-1]
    return Weights(torch.sigmoid(logits[:, :n]) + how.eps, post, comb, tuple(divisors), softmax)


def _dims(steps: int) -> list[int]:
    """The dims whose sums the matrix is divided by; the softmax has normed its rows."""
    return [-2, *[-1, -2] * (steps - 1)]


def _parts(weights: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Weights of the new streams [R, n], and those of the old ones in them [R, n, n], if they are mixed."""
    rows = weights.flatten(0, -2)
    return rows[:, :count], torch.unflatten(rows[:, count:], -1, (count, count)) if rows.shape[-1] > count else None


def _logit_gradients(found: Weights, grad_pre: Tensor, grad_weights: Tensor, scale: Tensor, how: Connection) -> Tensor:
    """Gradients of all logits [R, N]."""
    n = how.num_streams
    share = found.pre - how.eps
    parts = [grad_pre * share * (1 - share)]
    if len(scale) > 1:
        share = (found.post - (how.eps if len(scale) < 3 else 0.0)) / how.post_scale
        parts.append(grad_weights[:, :n] * share * (1 - share) * how.post_scale)
    if found.comb is not None and found.softmax is not None:
        comb, grad = found.comb, torch.unflatten(grad_weights[:, n:], -1, (n, n))
        for dim, divisor in zip(reversed(_dims(how.steps)), reversed(found.divisors), strict=True):
            grad = (grad - (grad * comb).sum(dim, keepdim=True)) / divisor
            comb = comb * divisor  # the matrix before this division
        parts.append((found.softmax * (grad - (grad * found.softmax).sum(-1, keepdim=True))).flatten(1))
    return torch.cat(parts, -1)
