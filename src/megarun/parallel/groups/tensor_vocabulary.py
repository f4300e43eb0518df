"""Embedding and loss over a vocabulary that is sharded over the TP group (`mesh.vocab_parallel`).

Rank i of tp owns the ids i · V / tp … (i + 1) · V / tp − 1. The embedding looks up every token of the sequence in its slice, zero for
other ranks' ids, and reduce-scatters the sum. The head computes logits of every token for the local ids. The loss needs no logits of other
ranks: each row's log-sum-exp is combined from the slices' (one maximum, one sum), and the label's logit comes from its rank.

Head and loss can be one operation, which never stores all logits: it saves the head's input rows of local tokens, and recomputes their
logits in backward.

Source: arXiv:1909.08053, section 3.
"""

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
from megarun.parallel.groups.delayed import numbers_of
from megarun.parallel.groups.scaled import Scaling
from megarun.parallel.groups.tensor import ALONE, TensorParallel

IGNORE_INDEX = -100


class SlicedEmbedding(nn.Module):
    """The rank's slice of a token embedding, weight [V / tp, h]."""

    def __init__(self, num_words: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(num_words, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids of all tokens [B, T] -> the residual stream of local tokens [B, t, h]."""
        partial: Tensor = _SlicedLookup.apply(tokens, self.weight, self.tp.index * self.weight.shape[0])  # type: ignore[no-untyped-call]
        return self.tp.reduce(partial)


def summed_cross_entropy(slices: TensorParallel | None, logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of logits [..., V] or, with `slices`, of local logits [..., V / tp]; labels [...] -> scalar."""
    rows, labels = logits.flatten(0, -2), labels.flatten()
    return cross_entropy(rows, labels) if slices is None else sliced_cross_entropy(slices, rows, labels)


def sliced_cross_entropy(tp: TensorParallel, logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over all rows of −log softmax(logits)[label], the same on every rank of the group.

    Args:
        tp: TP group of more than one rank.
        logits: Logits of the local vocabulary, [N, V / tp].
        labels: Labels, int64 [N].

    Returns:
        fp32 scalar (fp64 for fp64 logits).
    """
    loss: Tensor = _SlicedCrossEntropy.apply(tp, logits, labels)  # type: ignore[no-untyped-call]
    return loss


def summed_linear_cross_entropy(
    slices: TensorParallel | None, x: Tensor, weight: Tensor, labels: Tensor, scaling: Scaling | None = None
) -> Tensor:
    """Head and loss in one operation: for local tokens or, if the vocabulary is sharded, for all tokens.

    Args:
        slices: TP group if the vocabulary is sharded, else None.
        x: Local tokens [B, t, h].
        weight: Head weight, [V, h], or [V / tp, h] for the local vocabulary.
        labels: Labels of the tokens, int64.
        scaling: Low-precision settings of the products; None for x's dtype.

    Returns:
        fp32 scalar (fp64 for fp64 rows), summed over all rows; with `slices` the same on every rank of the group.
    """
    how = ("", "e4m3") if scaling is None else (scaling.by, scaling.gradient_format)
    numbers = numbers_of((scaling.numbers,), records=torch.is_grad_enabled()) if scaling is not None else []
    if slices is None and not numbers:
        return linear_cross_entropy(x.flatten(0, -2), weight, labels.flatten(), scaling=how[0], gradient_format=how[1])
    loss: Tensor = _SlicedHeadAndLoss.apply(slices or ALONE, how, (*numbers, None)[0], x, weight, labels.flatten())  # type: ignore[no-untyped-call]
    return loss


class _SlicedLookup(torch.autograd.Function):
    """Rows of local ids, zeros for others; saves the ids, which are the step's input."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first: int) -> Tensor:
        """[B, T] -> [B, T, h]."""
        ctx.save_for_backward(tokens)
        ctx.first, ctx.num_words = first, weight.shape[0]
        rows, others = _own_rows(tokens, first, weight.shape[0])
        return nn.functional.embedding(rows, weight).masked_fill_(others, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        """Gradient of the slice."""
        (tokens,) = ctx.saved_tensors
        rows, others = _own_rows(tokens, ctx.first, ctx.num_words)
        gradient = gradient.masked_fill_(others, 0)  # gathered only for this function
        return None, torch.ops.aten.embedding_dense_backward(gradient, rows, ctx.num_words, -1, False), None


def _own_rows(tokens: Tensor, first: int, num_words: int) -> tuple[Tensor, Tensor]:
    """Row of each token in the slice, 0 for other ranks' ids, and the mask of other ranks' ids [B, T, 1]."""
    rows = tokens - first
    others = (rows < 0) | (rows >= num_words)
    return rows.masked_fill_(others, 0), others.unsqueeze(-1)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Saves logits, labels, and the log-sum-exp of the full vocabulary, as the op on full rows."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, logits: Tensor, labels: Tensor) -> Tensor:
        """Local logits [N, V / tp], labels [N] -> scalar."""
        ctx.first = tp.index * logits.shape[1]
        check_labels(labels, tp.degree * logits.shape[1], IGNORE_INDEX)
        loss, lse = _joined(tp, labels, *slice_statistics(logits, labels, ctx.first))
        ctx.save_for_backward(logits, labels, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        """Gradient of local logits."""
        logits, labels, lse = ctx.saved_tensors
        return None, slice_gradient(gradient, logits, labels, lse, ctx.first, IGNORE_INDEX), None


class _SlicedHeadAndLoss(torch.autograd.Function):
    """Saves local tokens, labels, and the log-sum-exp of the full vocabulary; tokens are gathered again in backward."""

    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, how: tuple[str, str], numbers: Tensor | None, x: Tensor, weight: Tensor, labels: Tensor
    ) -> Tensor:
        """Local tokens [B, t, h], local weight [V / tp, h], labels of all tokens [N] -> scalar; `how`: scaling and gradients' format."""
        ctx.tp, ctx.first, ctx.how = tp, tp.index * weight.shape[0], (*how, numbers)
        check_labels(labels, tp.degree * weight.shape[0], IGNORE_INDEX)
        ctx.weight = weight  # save the gathered parameter itself, as every column-parallel linear does
        loss, lse = _joined(tp, labels, *linear_slice_statistics(_all_rows(tp, x), weight, labels, ctx.first, how[0], numbers))
        ctx.save_for_backward(x, labels, lse)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor, Tensor | None, None]:
        """Gradients of local tokens and, unless it is frozen, of the local weight."""
        x, labels, lse = ctx.saved_tensors
        rows, tp = _all_rows(ctx.tp, x), ctx.tp
        needs = [True, ctx.needs_input_grad[4]]
        partial, *of_weight = linear_slice_gradients(gradient, rows, ctx.weight, labels, lse, ctx.first, needs, IGNORE_INDEX, *ctx.how)
        del rows
        own = partial.view(x.shape[0], -1, x.shape[2])
        own = tp.start_reduce(own).wait() if tp.degree > 1 else own
        return None, None, None, own, of_weight[0] if of_weight else None, None


def _all_rows(tp: TensorParallel, x: Tensor) -> Tensor:
    """Local tokens [B, t, h] -> all tokens' rows [B · T, h]."""
    return (tp.start_gather(x).wait() if tp.degree > 1 else x).flatten(0, 1)


def _joined(tp: TensorParallel, labels: Tensor, own: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Combine slices: labels, and each slice's log-sum-exp and label logits [N] -> loss, and log-sum-exp of the full vocabulary [N]."""
    if tp.degree == 1:
        return torch.where(labels != IGNORE_INDEX, own - chosen, 0).sum(), own
    largest = tp.largest(own.clone())
    sums = tp.sum(torch.stack([(own - largest).exp_(), chosen]))
    lse = largest.add_(sums[0].log_())
    return torch.where(labels != IGNORE_INDEX, lse - sums[1], 0).sum(), lse
