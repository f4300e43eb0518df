"""Updates of optimizers: one pass over momentum and gradient, one over weight and update, and AdamW's. No gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import require
from megakernels._common.device import module_for
from megakernels.ops.optimizer import reference

__all__ = ["adamw_", "decayed_add_", "nesterov_"]


def nesterov_(momenta: list[Tensor], gradients: list[Tensor], updates: list[Tensor], keep: float, scale: Tensor) -> None:
    """Moves momenta m towards scaled gradients g, m ← m + (1 − keep) (g − m), and writes Nesterov updates m + (1 − keep) / keep · g.

    That is the update keep · m + (1 − keep) · g divided by keep, which does not change an orthogonalisation's result.

    Args:
        momenta: Contiguous tensors.
        gradients: Contiguous tensors with the same numbers of elements, in any dtype.
        updates: Tensors with the same numbers of elements, [rows, columns] or [matrices, rows, columns] with any strides, in any dtype;
            written.
        keep: Share of a momentum that is kept.
        scale: Factor of the gradients, a number on their device.

    Triton:
        One kernel for each tensor, in one pass.

    Raises:
        ValueError: numbers of elements differ, or a momentum or gradient is not contiguous.
    """
    _check("nesterov_", momenta, updates, gradients)
    if momenta:
        _nesterov_(momenta, gradients, updates, keep, scale)


def decayed_add_(weights: list[Tensor], updates: list[Tensor], rate: Tensor, weight_decay: float, factors: list[float]) -> None:
    """Decays weights and subtracts updates: weight ← (1 − rate · weight_decay) · weight − rate · factor · update.

    Args:
        weights: Contiguous tensors.
        updates: Tensors with the same numbers of elements, [rows, columns] or [matrices, rows, columns] with any strides, in any dtype.
        rate: Learning rate, a number on their device, whose products are made in fp64.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        factors: Factor of each update.

    Triton:
        One kernel for each tensor, in one pass.

    Raises:
        ValueError: numbers of elements differ, or a weight is not contiguous.
    """
    _check("decayed_add_", weights, updates)
    if weights:
        _decayed_add_(weights, updates, rate, weight_decay, factors)


def adamw_(
    weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], steps: list[Tensor],
    *, lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float, scale: Tensor,
) -> None:  # fmt: skip
    """An update of AdamW, as torch's fused implementation makes it, by scaled gradients.

    Args:
        weights: Contiguous tensors.
        gradients: Contiguous tensors, in the weights' dtype; without Triton scaled in place.
        first: First averages, in the weights' dtype.
        second: Second averages, in the weights' dtype.
        steps: Number of updates of each, fp32 scalars on its device; incremented.
        lr: Learning rate, a number on their device.
        betas: Shares of the averages that are kept.
        eps: Added to the root of the second average.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        scale: Factor of the gradients, a number on their device.

    Triton:
        One kernel for each tensor, in one pass.

    Raises:
        ValueError: numbers of elements differ, or a tensor is not contiguous.

    Source: aten/src/ATen/native/cuda/fused_adam_utils.cuh; arXiv:1711.05101, algorithm 2.
    """
    _check("adamw_", weights, first, gradients)
    _check("adamw_", weights, second, second)
    if weights:
        torch._foreach_add_(steps, 1)
        _adamw_(weights, gradients, first, second, steps, lr, *betas, eps, weight_decay, scale)


def _check(name: str, dense: Sequence[Tensor], strided: Sequence[Tensor], further: Sequence[Tensor] | None = None) -> None:
    for each, other, third in zip(dense, strided, dense if further is None else further, strict=True):
        fits = each.is_contiguous() and third.is_contiguous() and each.numel() == other.numel() == third.numel() and other.dim() <= 3
        require(fits, name, "tensors must have equal numbers of elements, and be contiguous", first=each.shape, second=other.shape)


@custom_op("megakernels::nesterov_", mutates_args=("momenta", "updates"))
def _nesterov_(momenta: Sequence[Tensor], gradients: Sequence[Tensor], updates: Sequence[Tensor], keep: float, scale: Tensor) -> None:
    shaped = [value.view(update.shape) for value, update in zip(momenta, updates, strict=True)]
    given = [value.view(update.shape) for value, update in zip(gradients, updates, strict=True)]
    module_for(momenta[0], reference).nesterov(shaped, given, updates, keep, scale)


@_nesterov_.register_fake
def _(_momenta: Sequence[Tensor], _gradients: Sequence[Tensor], _updates: Sequence[Tensor], _keep: float, _scale: Tensor) -> None:
    pass


@custom_op("megakernels::decayed_add_", mutates_args=("weights",))
def _decayed_add_(
    weights: Sequence[Tensor], updates: Sequence[Tensor], rate: Tensor, weight_decay: float, factors: Sequence[float]
) -> None:
    shaped = [weight.view(update.shape) for weight, update in zip(weights, updates, strict=True)]
    module_for(weights[0], reference).decayed_add(shaped, updates, rate, weight_decay, factors)


@_decayed_add_.register_fake
def _(_weights: Sequence[Tensor], _updates: Sequence[Tensor], _rate: Tensor, _weight_decay: float, _factors: Sequence[float]) -> None:
    pass


@custom_op("megakernels::adamw_", mutates_args=("weights", "gradients", "first", "second"))
def _adamw_(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], steps: Sequence[Tensor],
    lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, scale: Tensor,
) -> None:  # fmt: skip
    module_for(weights[0], reference).adamw(weights, gradients, first, second, steps, lr, beta1, beta2, eps, weight_decay, scale)


@_adamw_.register_fake
def _(
    _weights: Sequence[Tensor], _gradients: Sequence[Tensor], _first: Sequence[Tensor], _second: Sequence[Tensor],
    _steps: Sequence[Tensor],
    _lr: Tensor, _beta1: float, _beta2: float, _eps: float, _weight_decay: float, _scale: Tensor,
) -> None:  # fmt: skip
    pass
