"""Cross entropy of logits whose vocabulary is sliced: statistics of each slice, and its gradient given the full statistics.

With m = the largest lse over the slices: lse = m + log Σ_slices exp(lse_slice − m), and a row's label logit is the sum over slices, of
which all except one are zero. The caller combines the slices; these functions do not communicate.

Source: arXiv:1909.08053, section 3 (the parallel cross entropy of Megatron-LM).
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, fake_like, require
from megakernels._common.device import module_for
from megakernels.ops.cross_entropy import reference


def slice_statistics(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Statistics of each row over a slice of the vocabulary.

    Args:
        logits: [N, V / n], columns first … first + V / n − 1.
        labels: int64 [N], ids of the full vocabulary; a label outside the slice, or an ignored one, contributes zero; the caller, who knows
            the vocabulary, calls `check_labels`.
        first: First vocabulary id of the slice.

    Returns:
        Log-sum-exp of the slice and the label's logit if it is in the slice, else 0: fp32 [N] each (fp64 for fp64 logits).

    Triton:
        The forward kernel of `cross_entropy`.

    Raises:
        ValueError: shapes do not fit, or labels are not int64.
    """
    _require("slice_statistics", logits, labels)
    found: tuple[Tensor, Tensor] = _slice_statistics(logits, labels, first)
    return found


def slice_gradient(grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignore_index: int = -100) -> Tensor:
    """The gradient of a slice's logits for the loss Σ lse − logit[label] over the rows whose label is not ignored.

    Args:
        grad_loss: Scalar.
        logits: [N, V / n].
        labels: int64 [N], ids of the full vocabulary.
        lse: fp32 [N], log-sum-exp of the full vocabulary.
        first: First vocabulary id of the slice.
        ignore_index: Label of ignored rows.

    Returns:
        [N, V / n] in the dtype of logits.

    Triton:
        The backward kernel of `cross_entropy`.

    Raises:
        ValueError: shapes do not fit, or labels are not int64.
    """
    _require("slice_gradient", logits, labels)
    found: Tensor = _slice_gradient(grad_loss, logits, labels, lse, first, ignore_index)
    return found


def _require(operation: str, logits: Tensor, labels: Tensor) -> None:
    fits = logits.dim() == 2 and labels.shape == logits.shape[:1]
    require(fits, operation, "logits must be [N,V/n] and labels [N]", logits=logits.shape, labels=labels.shape)
    require(labels.dtype == torch.int64, operation, "labels must be int64", labels=labels.dtype)


@custom_op("megakernels::slice_statistics", mutates_args=())
def _slice_statistics(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = module_for(logits, reference).slice_forward(logits, labels, first)
    return result


@custom_op("megakernels::slice_gradient", mutates_args=())
def _slice_gradient(grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, first: int, ignore_index: int) -> Tensor:
    result: Tensor = module_for(logits, reference).slice_backward(grad_loss, logits, labels, lse, first, ignore_index)
    return result


@_slice_statistics.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    made = logits.new_empty((logits.shape[0],), dtype=accumulator_dtype(logits.dtype))
    return made, fake_like(made)


@_slice_gradient.register_fake
def _(_grad_loss: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return fake_like(logits)
