"""Cross entropy of next-token logits, summed. Saved: logits, labels, lse."""

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, join, require
from megakernels._common.device import module_for
from megakernels.ops.cross_entropy import reference
from megakernels.ops.cross_entropy.labels import check_labels, refuse_labels
from megakernels.ops.cross_entropy.slices import slice_gradient, slice_statistics

__all__ = ["check_labels", "cross_entropy", "slice_gradient", "slice_statistics"]


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum over rows of −log softmax(logits)[label]; the caller divides.

    Args:
        logits: [N, V].
        labels: int64 [N], each in [0, V) or ignore_index.
        ignore_index: label of ignored rows.

    Returns:
        fp32 scalar (fp64 for fp64 logits).

    Saves:
        lse: fp32 [N].

    Triton:
        One kernel forward, one backward.

    Raises:
        ValueError: shapes do not fit, labels are not int64 or, on a CPU, one is out of bounds; on CUDA the device asserts.
    """
    require(
        logits.dim() == 2 and labels.shape == logits.shape[:1],
        "cross_entropy",
        "logits must be [N,V] and labels [N]",
        logits=logits.shape,
        labels=labels.shape,
    )
    require(labels.dtype == torch.int64, "cross_entropy", "labels must be int64", labels=labels.dtype)
    loss: Tensor = _cross_entropy(logits, labels, ignore_index)[0]
    return loss


@custom_op("megakernels::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    refuse_labels(labels, logits.shape[1], ignore_index)
    result: tuple[Tensor, Tensor] = module_for(logits, reference).forward(logits, labels, ignore_index)
    return result


@custom_op("megakernels::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    grad_loss: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int, needs: list[bool]
) -> list[Tensor]:
    if not needs[0]:
        return []
    result: Tensor = module_for(logits, reference).backward(grad_loss, logits, labels, lse, ignore_index)
    return [result]


@_cross_entropy.register_fake
def _(logits: Tensor, _labels: Tensor, _ignore_index: int) -> tuple[Tensor, Tensor]:
    dtype = accumulator_dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty((logits.shape[0],), dtype=dtype)


join(_cross_entropy, _cross_entropy_backward, outputs=("loss", "lse"), gradients=("logits",))
