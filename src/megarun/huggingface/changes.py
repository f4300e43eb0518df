"""Conversion of a rule's values between Hugging Face's tensors (theirs) and megarun's (ours): exactly invertible."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megarun.huggingface.rules import Rule


def to_ours(rule: Rule, theirs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Our tensors from theirs, in the rule's order and the dtype of theirs."""
    whole = torch.stack(list(theirs)) if rule.stacked else theirs[0]
    if rule.transposed:
        whole = whole.mT
    whole = _swapped(rule, whole.reshape(rule.joined))
    dim = rule.row_dim
    whole = torch.unflatten(whole, dim, (rule.groups, -1))
    pieces = list(torch.split(whole, _rows(rule), dim + 1))
    found = []
    for each in rule.ours:
        own = [pieces.pop(0).flatten(dim, dim + 1) for _ in range(each.parts)]
        found.append(_ordered(torch.cat(own, dim), each.order).reshape(each.shape).contiguous())
    return tuple(found)


def to_theirs(rule: Rule, ours: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Convert our tensors to the Hugging Face tensors of a rule, in the rule's order and our dtype."""
    dim = rule.row_dim
    pieces = []
    for each, whole in zip(rule.ours, ours, strict=True):
        own = torch.chunk(_ordered(whole, each.order, back=True), each.parts, dim)
        pieces += [torch.unflatten(piece, dim, (rule.groups, -1)) for piece in own]
    joined = _swapped(rule, torch.cat(pieces, dim + 1).flatten(dim, dim + 1))
    if rule.transposed:
        joined = joined.mT
    return tuple(tensor.contiguous() for tensor in joined.reshape(len(rule.theirs), *rule.shape))


def _rows(rule: Rule) -> list[int]:
    """Number of rows of each of our tensors in a group of theirs."""
    return [each.shape[rule.row_dim] // (each.parts * rule.groups) for each in rule.ours for _ in range(each.parts)]


def _swapped(rule: Rule, whole: Tensor) -> Tensor:
    """Exchange the two halves of the columns if the rule requires it; import and export do the same."""
    return torch.cat(torch.chunk(whole, 2, -1)[::-1], -1) if rule.swapped else whole


def _ordered(rows: Tensor, order: tuple[int, ...], *, back: bool = False) -> Tensor:
    if not order:
        return rows
    index = torch.tensor(order)
    return torch.unflatten(rows, 0, (-1, len(order))).index_select(1, index.argsort() if back else index).flatten(0, 1)
