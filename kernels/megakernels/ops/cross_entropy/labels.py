"""Refuses labels outside the vocabulary, as torch's `cross_entropy`."""

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import require

IGNORE_INDEX = -100
"""torch's default label of ignored rows."""


def check_labels(labels: Tensor, num_words: int, ignore_index: int = IGNORE_INDEX) -> None:
    """Refuses labels outside the vocabulary.

    On CUDA the check runs on the device without a synchronisation; as in torch, the error is raised by the next synchronising operation.

    Args:
        labels: int64 [N].
        num_words: Size of the full vocabulary.
        ignore_index: Label of ignored rows.

    Raises:
        ValueError: On a CPU: a label is not ignore_index and outside 0 … num_words − 1.
    """
    _check_labels(labels, num_words, ignore_index)


@custom_op("megakernels::check_labels", mutates_args=())
def _check_labels(labels: Tensor, num_words: int, ignore_index: int) -> None:
    refuse_labels(labels, num_words, ignore_index)


@_check_labels.register_fake
def _(_labels: Tensor, _num_words: int, _ignore_index: int) -> None:
    return


def refuse_labels(labels: Tensor, num_words: int, ignore_index: int) -> None:
    """`check_labels` inside an operation."""
    wrong = ((labels < 0) | (labels >= num_words)) & (labels != ignore_index)
    if labels.device.type != "cpu":
        torch._assert_async(~wrong.any(), "cross_entropy: a label is outside the vocabulary and not ignore_index")
    elif wrong.any():
        found = labels[wrong][0].item()
        require(False, "cross_entropy", "labels must be in 0 … V − 1 or ignore_index", label=found, V=num_words, ignore_index=ignore_index)
