"""Values of a rule, from theirs to ours and back: every change moves elements and is undone exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarun.huggingface.rules import Rule


def to_ours(rule: Rule, theirs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Our tensors from theirs, in the rule's order, in their dtype."""
    whole = torch.stack(list(theirs)) if rule.stacked else theirs[0]
    if rule.transposed:
        whole = whole.mT
    whole = whole.reshape(rule.joined)
    dim, count = rule.row_dim, len(rule.ours)
    if rule.interleaved:
        parts = [torch.unflatten(whole, dim, (-1, count)).select(dim + 1, index) for index in range(count)]
    else:
        parts = list(torch.split(whole, [each.shape[dim] for each in rule.ours], dim))
    return tuple(_ordered(part, each.order).reshape(each.shape).contiguous() for each, part in zip(rule.ours, parts, strict=True))


def to_theirs(rule: Rule, ours: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Their tensors from ours, in the rule's order, in our dtype."""
    dim = rule.row_dim
    parts = [_ordered(part, each.order, back=True) for each, part in zip(rule.ours, ours, strict=True)]
    whole = torch.stack(parts, dim + 1).flatten(dim, dim + 1) if rule.interleaved else torch.cat(parts, dim)
    if rule.transposed:
        whole = whole.mT
    each = list(whole) if rule.stacked else [whole]
    return tuple(tensor.reshape(rule.shape).contiguous() for tensor in each)


def _ordered(rows: Tensor, order: tuple[int, ...], *, back: bool = False) -> Tensor:
    if not order:
        return rows
    index = torch.tensor(order)
    return torch.unflatten(rows, 0, (-1, len(order))).index_select(1, index.argsort() if back else index).flatten(0, 1)
