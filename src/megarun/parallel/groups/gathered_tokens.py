"""Tokens that the ranks of a group gather, the same number each, and sums of partial results that are scattered to the tokens' ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarun.parallel.groups.tensor import TensorParallel


def gathered_tokens(group: TensorParallel, tokens: Tensor) -> Tensor:
    """Tokens of all ranks of the group, by rank: [N, ...] each -> [ranks · N, ...]."""
    if group.degree == 1:
        return tokens
    whole: Tensor = _Gather.apply(group, tokens)  # type: ignore[no-untyped-call]
    return whole


def scattered_sum(group: TensorParallel, partial: Tensor) -> Tensor:
    """This rank's tokens of the group's sum: [ranks · N, ...] -> [N, ...]."""
    if group.degree == 1:
        return partial
    own: Tensor = _Scatter.apply(group, partial)  # type: ignore[no-untyped-call]
    return own


class _Gather(torch.autograd.Function):
    """An all-gather, whose gradients are summed and scattered; saves nothing."""

    @staticmethod
    def forward(ctx: Any, group: TensorParallel, tokens: Tensor) -> Tensor:
        """[N, ...] -> [ranks · N, ...]."""
        ctx.group = group
        return group.gather_rows(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Gradients of own tokens."""
        return None, ctx.group.scatter_rows(gradient)


class _Scatter(torch.autograd.Function):
    """A reduce-scatter, whose gradients are gathered; saves nothing."""

    @staticmethod
    def forward(ctx: Any, group: TensorParallel, partial: Tensor) -> Tensor:
        """[ranks · N, ...] -> [N, ...]."""
        ctx.group = group
        return group.scatter_rows(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Gradients of the partial results."""
        return None, ctx.group.gather_rows(gradient)
