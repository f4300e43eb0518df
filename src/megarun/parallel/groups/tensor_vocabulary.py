"""Embedding and loss over a vocabulary that the TP group has cut into slices (`mesh.vocab_parallel`).

Rank i of tp owns the words i · V / tp … (i + 1) · V / tp − 1. The embedding looks every token of the sequence up in its slice, zero where
the word is another rank's, and reduce-scatters the sum. The head makes logits of every token for its own words. The loss needs no logits
of other ranks: each row's log-sum-exp is joined from the slices' (one maximum, one sum), beside the label's logit, which one rank has.

Head and loss may be one operation, whose logits are never whole, of all words or of a rank's own: it keeps the rows that the head
multiplies, of own tokens, and makes their logits again in backward.

Source: arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megakernels import (
    check_labels,
    cross_entropy,
    linear_cross_entropy,
    linear_slice_gradients,
    linear_slice_statistics,
    slice_gradient,
    slice_statistics,
)
from megarun.parallel.groups.tensor import TensorParallel

IGNORE_INDEX = -100


class SlicedEmbedding(nn.Module):
    """The rank's slice of a token embedding, weight [V / tp, h]."""

    def __init__(self, num_words: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(num_words, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids of all tokens [B, T] -> the residual stream of own tokens [B, t, h]."""
        partial: Tensor = _SlicedLookup.apply(tokens, self.weight, self.tp.index * self.weight.shape[0])  # type: ignore[no-untyped-call]
        return self.tp.reduce(partial)


def summed_cross_entropy(slices: TensorParallel | None, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every row's label, of whole logits [..., V] or, with `slices`, of own words' [..., V / tp]; labels [...] -> scalar."""
    rows, labels = logits.flatten(0, -2), labels.flatten()
    return cross_entropy(rows, labels) if slices is None else sliced_cross_entropy(slices, rows, labels)


def sliced_cross_entropy(tp: TensorParallel, logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over all rows of −log softmax(logits)[label], the same on every rank of the group.

    Args:
        tp: More than one rank.
        logits: [N, V / tp], of own words.
        labels: int64 [N].

    Returns:
        fp32 scalar (fp64 for fp64 logits).
    """
    loss: Tensor = _SlicedCrossEntropy.apply(tp, logits, labels)  # type: ignore[no-untyped-call]
    return loss


def summed_linear_cross_entropy(slices: TensorParallel | None, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Head and loss in one: of own tokens' labels or, where the words are cut, of all tokens'.

    Args:
        slices: Who holds the other words, if any does.
        x: Own tokens [B, t, h].
        weight: [V, h], or own words' [V / tp, h].
        labels: int64, of the tokens whose loss it is.

    Returns:
        fp32 scalar (fp64 for fp64 rows), summed over all rows; with `slices` the same on every rank of the group.
    """
    if slices is None:
        return linear_cross_entropy(x.flatten(0, -2), weight, labels.flatten())
    loss: Tensor = _SlicedHeadAndLoss.apply(slices, x, weight, labels.flatten())  # type: ignore[no-untyped-call]
    return loss


class _SlicedLookup(torch.autograd.Function):
    """Rows of own words, zeros for others; keeps the ids, which are the step's input."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first: int) -> Tensor:
        """[B, T] -> [B, T, h]."""
        ctx.save_for_backward(tokens)
        ctx.first, ctx.num_words = first, weight.shape[0]
        rows, others = _own_rows(tokens, first, weight.shape[0])
        return nn.functional.embedding(rows, weight).masked_fill_(others, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        """Of the slice."""
        (tokens,) = ctx.saved_tensors
        rows, others = _own_rows(tokens, ctx.first, ctx.num_words)
        gradient = gradient.masked_fill_(others, 0)  # gathered for this function alone
        return None, torch.ops.aten.embedding_dense_backward(gradient, rows, ctx.num_words, -1, False), None


def _own_rows(tokens: Tensor, first: int, num_words: int) -> tuple[Tensor, Tensor]:
    """Row of each token in the slice, 0 where its word is another rank's, and that mask [B, T, 1]."""
    rows = tokens - first
    others = (rows < 0) | (rows >= num_words)
    return rows.masked_fill_(others, 0), others.unsqueeze(-1)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Keeps logits, labels, and the log-sum-exp of the whole vocabulary, as the op on whole rows does."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, logits: Tensor, labels: Tensor) -> Tensor:
        """Of own words: [N, V / tp], [N] -> scalar."""
        ctx.first = tp.index * logits.shape[1]
        check_labels(labels, tp.degree * logits.shape[1], IGNORE_INDEX)
        loss, lse = _joined(tp, labels, *slice_statistics(logits, labels, ctx.first))
        ctx.save_for_backward(logits, labels, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        """Of own logits."""
        logits, labels, lse = ctx.saved_tensors
        return None, slice_gradient(gradient, logits, labels, lse, ctx.first, IGNORE_INDEX), None


class _SlicedHeadAndLoss(torch.autograd.Function):
    """Keeps own tokens, labels, and the log-sum-exp of the whole vocabulary; all tokens are gathered again in backward."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Own tokens [B, t, h], own words [V / tp, h], labels of all tokens [N] -> scalar."""
        ctx.tp, ctx.first = tp, tp.index * weight.shape[0]
        check_labels(labels, tp.degree * weight.shape[0], IGNORE_INDEX)
        ctx.weight = weight  # the gathered parameter itself, as of every column-parallel linear
        loss, lse = _joined(tp, labels, *linear_slice_statistics(_all_rows(tp, x), weight, labels, ctx.first))
        ctx.save_for_backward(x, labels, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, None]:
        """Of own tokens, and of own words."""
        x, labels, lse = ctx.saved_tensors
        rows, tp = _all_rows(ctx.tp, x), ctx.tp
        partial, grad_weight = linear_slice_gradients(gradient, rows, ctx.weight, labels, lse, ctx.first, [True, True], IGNORE_INDEX)
        del rows
        return None, tp.start_reduce(partial.view(x.shape[0], -1, x.shape[2])).wait(), grad_weight, None


def _all_rows(tp: TensorParallel, x: Tensor) -> Tensor:
    """Own tokens [B, t, h] -> all tokens' rows [B · T, h]."""
    return tp.start_gather(x).wait().flatten(0, 1)


def _joined(tp: TensorParallel, labels: Tensor, own: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Labels, and each slice's log-sum-exp and chosen logits [N] -> the loss, and the whole vocabulary's log-sum-exp [N]."""
    largest = tp.largest(own.clone())
    sums = tp.sum(torch.stack([(own - largest).exp_(), chosen]))
    lse = largest.add_(sums[0].log_())
    return torch.where(labels != IGNORE_INDEX, lse - sums[1], 0).sum(), lse
