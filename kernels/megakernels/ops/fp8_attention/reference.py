"""Attention of eight-bit operands in plain torch, a block of queries at a time.

Queries, keys, values and the gradient of the output have a scale each, for the whole tensor, that is a power of two. Scores are products of
quantised queries and keys, in fp32, as the softmax is. Its weights are at most one, and are quantised by a constant factor; the softmax'
backward uses the unquantised weights, like Transformer Engine's. The gradient of scores is quantised by its largest magnitude, for which
blocks run once before.

Source: Transformer Engine, `UnfusedDotProductAttention` and `FP8EmulationFunc`; arXiv:2407.08608, section 3.3, for the weights' factor.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megakernels.ops.attention import reference
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.fp8_attention.facts import WEIGHT_FACTOR
from megakernels.ops.fp8_linear.reference import power_of_two, round_rows

E4M3 = torch.float8_e4m3fn


class Low(NamedTuple):
    """Quantised operands.

    Attributes:
        q: e4m3 [B, T, Hq, D].
        k: e4m3 [B, T, Hkv, D].
        v: e4m3 [B, T, Hkv, Dv].
        scales: fp32 [3], of q, k and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor


class Form(NamedTuple):
    """Shape of the scores.

    Attributes:
        starts: int32 [B, T] or None, the documents of packed rows.
        scale: Factor of scores.
        window: Positions that a query sees, or None.
        cap: Cap of scores, or None.
    """

    starts: Tensor | None
    scale: float
    window: int | None
    cap: float | None


def quantised(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """A tensor in eight bits, and its scale, fp32 [1]."""
    rows = x.reshape(-1, x.shape[-1])
    factor = power_of_two(torch.linalg.vector_norm(rows, float("inf")).view(1), dtype)
    low = torch.empty(x.shape, dtype=dtype, device=x.device)
    round_rows(rows, factor.to(x.dtype), low.view(rows.shape))
    return low, 1 / factor


def forward(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor, Low]:
    """Returns out [B, T, Hq, Dv] in q's dtype, lse [B, Hq, T], and the operands."""
    (low_q, scale_q), (low_k, scale_k), (low_v, scale_v) = (quantised(each) for each in (q, k, v))
    low = Low(low_q, low_k, low_v, torch.cat((scale_q, scale_k, scale_v)))
    blocks = _Blocks(low, form)
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    for rows, seen in blocks:
        scores = blocks.scores(rows, seen)
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        del scores
        total = weights.sum(-1, keepdim=True)
        _round(weights.div_(total), WEIGHT_FACTOR, E4M3)
        lse[:, :, rows] = largest.add_(total.log_()).squeeze(-1).flatten(1, 2)
        out[:, rows] = reference.per_query(weights, blocks.v[:, :, 0, seen]).flatten(1, 2).transpose(1, 2)
        del weights
    return out, lse, low


def backward(grad_out: Tensor, low: Low, lse: Tensor, form: Form, gradient_dtype: torch.dtype) -> list[Tensor]:
    """Returns the gradients of q, k and v."""
    blocks, dtype = _Blocks(low, form), grad_out.dtype
    grads = _values(*quantised(grad_out, gradient_dtype), low.k.shape[2])
    grad_q = torch.empty(low.q.shape, dtype=dtype, device=grad_out.device)
    sums_k, sums_v = torch.zeros_like(blocks.k[:, :, 0]), torch.zeros_like(blocks.v[:, :, 0])
    group_lse = torch.unflatten(lse, 1, (low.k.shape[2], -1)).unsqueeze(-1)
    largest = torch.zeros((), dtype=torch.float32, device=grad_out.device)
    for rows, seen in blocks:
        largest = torch.maximum(largest, torch.linalg.vector_norm(blocks.gradients(rows, seen, grads, group_lse)[1], float("inf")))
    factor = power_of_two(largest, gradient_dtype)
    for rows, seen in blocks:
        weights, grad_scores = blocks.gradients(rows, seen, grads, group_lse)
        _round(grad_scores, factor, gradient_dtype)
        made = reference.per_query(grad_scores, blocks.k[:, :, 0, seen]).mul_(form.scale)
        grad_q[:, rows] = made.flatten(1, 2).transpose(1, 2)
        del made
        sums_k[:, :, seen] += reference.per_key(grad_scores, blocks.q[:, :, :, rows])
        del grad_scores
        _round(weights, WEIGHT_FACTOR, E4M3)
        sums_v[:, :, seen] += reference.per_key(weights, grads[:, :, :, rows])
        del weights
    made_k, made_v = (torch.empty(each.shape, dtype=dtype, device=grad_out.device) for each in (low.k, low.v))
    made_k.copy_(sums_k.transpose(1, 2))
    made_v.copy_(sums_v.transpose(1, 2))
    return [grad_q, made_k, made_v]


class _Blocks:
    """The values of the operands by groups of heads, queries times the factor of scores, and blocks of queries."""

    def __init__(self, low: Low, form: Form) -> None:
        groups = low.k.shape[2]
        self.q, self.k, self.v = (_values(each, scale, groups) for each, scale in zip(low[:3], low.scales, strict=True))
        self.q.mul_(form.scale)
        self.cap = form.cap
        self._given = Attention(low.q, low.k, low.v, form.starts, form.scale, form.window, None, None, None, form.cap, True)
        self._hides = reference.order_of(self._given, 0)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Blocks of queries, each with the keys visible to any of them."""
        return reference.blocks(self._given, 0)

    def scores(self, rows: slice, seen: slice) -> Tensor:
        """Scores of a block, −∞ for masked keys."""
        return reference.scores_of(self.q[:, :, :, rows], self.k[:, :, :, seen], self._hides(rows, seen), seen, None, self.cap)

    def gradients(self, rows: slice, seen: slice, grads: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The softmax' weights of a block and the gradient of its scores before their factor."""
        weights = self.scores(rows, seen).sub_(lse[:, :, :, rows]).exp_()
        found = reference.per_query(grads[:, :, :, rows], self.v[:, :, 0, seen].mT)
        found.sub_((weights * found).sum(-1, keepdim=True)).mul_(weights)
        if self.cap is not None:
            steepness = reference.per_query(self.q[:, :, :, rows], self.k[:, :, 0, seen].mT).div_(self.cap).tanh_().square_()
            found.addcmul_(found, steepness, value=-1)
        return weights, found


def _values(low: Tensor, scale: Tensor, groups: int) -> Tensor:
    """The values of a quantised tensor [B, T, H, D] as fp32 [B, groups, H / groups, T, D]."""
    turned = low.transpose(1, 2)
    found = torch.empty(turned.shape, dtype=torch.float32, device=low.device).copy_(turned).mul_(scale)
    return torch.unflatten(found, 1, (groups, -1))


def _round(values: Tensor, factor: Tensor | float, dtype: torch.dtype) -> None:
    """Round values to eight bits in place."""
    values.mul_(factor)
    values.copy_(values.to(dtype)).div_(factor)
