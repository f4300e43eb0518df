"""Head and loss in one: cross entropy of x Wᵀ whose logits are never whole, forward or backward. Saved: x, weight, labels, lse."""

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, join, only_needed, require, runs_triton
from megakernels.linear_cross_entropy import slices

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100, z_loss: float = 0.0) -> Tensor:
    """Sum over rows of lse − logit[label] + z_loss · lse², with logits x weightᵀ and lse = log Σ exp of a row; the caller divides.

    Logits are made a slice of the vocabulary at a time, in x's dtype, and made again in backward.

    Args:
        x: [N, h].
        weight: [V, h], in x's dtype.
        labels: int64 [N], each in [0, V) or ignore_index.
        ignore_index: Label of rows that do not count.
        z_loss: Factor of the squared log-sum-exp, which keeps logits small.

    Returns:
        fp32 scalar (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: arXiv:2411.09009, section 4; z-loss: arXiv:2204.02311, section 5.
    """
    require(
        x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1] and labels.shape == x.shape[:1],
        "linear_cross_entropy",
        "x must be [N,h], weight [V,h] and labels [N]",
        x=x.shape,
        weight=weight.shape,
        labels=labels.shape,
    )
    require(x.dtype == weight.dtype, "linear_cross_entropy", "x and weight must have one dtype", x=x.dtype, weight=weight.dtype)
    require(labels.dtype == torch.int64, "linear_cross_entropy", "labels must be int64", labels=labels.dtype)
    loss: Tensor = _linear_cross_entropy(x, weight, labels, ignore_index, z_loss)[0]
    return loss


@custom_op("megakernels::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    return slices.forward(x, weight, labels, ignore_index, z_loss, _on_slices(x))


@custom_op("megakernels::linear_cross_entropy_backward", mutates_args=())
def _linear_cross_entropy_backward(
    grad_loss: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    ignore_index: int,
    z_loss: float,
    needs: list[bool],
) -> list[Tensor]:
    return only_needed(slices.backward(grad_loss, x, weight, labels, lse, ignore_index, z_loss, needs, _on_slices(x)))


def _on_slices(x: Tensor) -> slices.OnSlices:
    """What joins and turns slices of logits: the cross entropy's kernels, or plain torch."""
    if runs_triton(x):
        from megakernels.cross_entropy import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel
    from megakernels.linear_cross_entropy import reference  # noqa: PLC0415

    return reference


@_linear_cross_entropy.register_fake
def _(x: Tensor, _weight: Tensor, _labels: Tensor, _ignore_index: int, _z_loss: float) -> tuple[Tensor, Tensor]:
    dtype = accumulator_dtype(x.dtype)
    return x.new_empty((), dtype=dtype), x.new_empty((x.shape[0],), dtype=dtype)


join(_linear_cross_entropy, _linear_cross_entropy_backward, outputs=("loss", "lse"), gradients=("x", "weight"))
