"""Head and loss in one operation: cross entropy of x Wᵀ that never stores all logits. Saved: x, weight, labels, lse."""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import Cost, accumulator_dtype, fake_like, join, only_needed, register_cost, register_scratch, require, runs_triton
from megakernels._common.device import kernel_module
from megakernels.ops.cross_entropy import reference as cross_entropy_reference
from megakernels.ops.cross_entropy.labels import refuse_labels
from megakernels.ops.fp8_linear.facts import DELAYED
from megakernels.ops.fp8_linear.inputs import DTYPES, FORMATS, SCALINGS, check_numbers
from megakernels.ops.linear_cross_entropy import reference, slices
from megakernels.ops.linear_cross_entropy.products import products_of

__all__ = ["linear_cross_entropy", "linear_slice_gradients", "linear_slice_statistics"]


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100, z_loss: float = 0.0,
    scaling: str = "", gradient_format: str = "e4m3",
) -> Tensor:  # fmt: skip
    """Sum over rows of lse − logit[label] + z_loss · lse², with logits x weightᵀ and lse = log Σ exp of a row; the caller divides.

    Logits are computed one slice of the vocabulary at a time, in x's dtype, and recomputed in backward.

    Args:
        x: [N, h].
        weight: [V, h], in x's dtype.
        labels: int64 [N], each in [0, V) or ignore_index.
        ignore_index: Label of ignored rows.
        z_loss: Factor of the squared log-sum-exp, which keeps logits small.
        scaling: Scaling of `fp8_linears` if the three products multiply in fewer bits, of fp32 or bf16; else empty. With delayed a caller
            uses the two operations on slices, since this one records nothing.
        gradient_format: e4m3 or e5m2, in which the gradient of logits multiplies then.

    Returns:
        fp32 scalar (fp64 for fp64 inputs).

    Saves:
        lse: fp32 [N].

    Scratch:
        A slice of 2²⁷ logits at most; backward, if x has two bytes per element, also the sum for x's gradient in fp32 and one product that
        is added to it. With a scaling also the rows in it, in backward twice, and one product's copies of weight and gradient.

    Triton:
        The kernels of `cross_entropy` on each slice of logits, in place; products are torch's, copies `fp8_quantize`'s.

    Raises:
        ValueError: shapes or dtypes do not fit or, on a CPU, a label is out of bounds; on CUDA the device asserts.

    Source: arXiv:2411.09009, section 4; z-loss: arXiv:2204.02311, section 5.
    """
    _require("linear_cross_entropy", x, weight, labels, scaling, gradient_format)
    require(scaling != DELAYED, "linear_cross_entropy", "scaling delayed exists for slices only", scaling=scaling)
    loss: Tensor = _linear_cross_entropy(x, weight, labels, ignore_index, z_loss, scaling, gradient_format)[0]
    return loss


def linear_slice_statistics(
    x: Tensor, weight: Tensor, labels: Tensor, first: int, scaling: str = "", numbers: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Statistics of each row over a slice of the vocabulary, of logits x weightᵀ, which never exist in full; not differentiable.

    Args:
        x: [N, h].
        weight: [V / n, h], rows first … first + V / n − 1, in x's dtype.
        labels: int64 [N], ids of the full vocabulary; a label of another slice, or an ignored one, contributes zero; the caller, who knows
            the vocabulary, calls `check_labels`.
        first: First vocabulary id of the slice.
        scaling: Scaling of `linear_cross_entropy`.
        numbers: The head's numbers [3, 3] with scaling delayed, as `fp8_linears` takes them; None otherwise.

    Returns:
        Log-sum-exp of the slice and the label's logit if it is in the slice, else 0: fp32 [N] each (fp64 for fp64 inputs).

    Scratch:
        As `linear_cross_entropy` forward.

    Triton:
        As `linear_cross_entropy`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _require("linear_slice_statistics", x, weight, labels, scaling)
    check_numbers("linear_slice_statistics", scaling, () if numbers is None else (numbers,), 1)
    found: tuple[Tensor, Tensor] = _linear_slice_statistics(x, weight, labels, first, scaling, numbers)
    return found


def linear_slice_gradients(
    grad_loss: Tensor, x: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, first: int, needs: list[bool], ignore_index: int = -100,
    scaling: str = "", gradient_format: str = "e4m3", numbers: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the loss Σ lse − logit[label], over the rows whose label is not ignored, through a slice of the vocabulary.

    Args:
        grad_loss: Scalar.
        x: [N, h].
        weight: [V / n, h].
        labels: int64 [N], ids of the full vocabulary.
        lse: fp32 [N], log-sum-exp of the full vocabulary.
        first: First vocabulary id of the slice.
        needs: True if the gradient is required, for each of x and weight.
        ignore_index: Label of ignored rows.
        scaling: Scaling of `linear_cross_entropy`.
        gradient_format: Format of `linear_cross_entropy`.
        numbers: The head's numbers, as `linear_slice_statistics` takes them.

    Returns:
        The required gradients: the slice's share of x's gradient [N, h], to be summed over slices, and the weight's gradient.

    Scratch:
        As `linear_cross_entropy` backward.

    Triton:
        As `linear_cross_entropy`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _require("linear_slice_gradients", x, weight, labels, scaling, gradient_format)
    check_numbers("linear_slice_gradients", scaling, () if numbers is None else (numbers,), 1)
    how = scaling, gradient_format, numbers, needs
    found: list[Tensor] = _linear_slice_gradients(grad_loss, x, weight, labels, lse, first, ignore_index, *how)
    return found


def _require(operation: str, x: Tensor, weight: Tensor, labels: Tensor, scaling: str, gradient_format: str = "e4m3") -> None:
    fits = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1] and labels.shape == x.shape[:1]
    shapes = {"x": x.shape, "weight": weight.shape, "labels": labels.shape}
    require(fits, operation, "x must be [N,h], weight [V,h] and labels [N]", **shapes)
    require(x.dtype == weight.dtype, operation, "x and weight must have one dtype", x=x.dtype, weight=weight.dtype)
    require(labels.dtype == torch.int64, operation, "labels must be int64", labels=labels.dtype)
    fits = not scaling or (scaling in SCALINGS and x.dtype in DTYPES and gradient_format in FORMATS)
    expected = "scaling must be one of fp8_linears, of fp32 or bf16, gradient_format e4m3 or e5m2"
    require(fits, operation, expected, scaling=scaling, gradient_format=gradient_format, x=x.dtype)


@custom_op("megakernels::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, z_loss: float, scaling: str,
    gradient_format: str,  # noqa: ARG001  of the backward, which takes its constants from here
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_labels(labels, weight.shape[0], ignore_index)
    return slices.forward(x, weight, labels, ignore_index, z_loss, _on_slices(x), products_of(x, scaling))


@custom_op("megakernels::linear_cross_entropy_backward", mutates_args=())
def _linear_cross_entropy_backward(
    grad_loss: Tensor, x: Tensor, weight: Tensor, labels: Tensor, lse: Tensor,
    ignore_index: int, z_loss: float, scaling: str, gradient_format: str, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    products = products_of(x, scaling, gradient_format, backward=True)
    return only_needed(slices.backward(grad_loss, x, weight, labels, lse, 0, ignore_index, z_loss, needs, _on_slices(x), products))


@custom_op("megakernels::linear_slice_statistics", mutates_args=("numbers",))
def _linear_slice_statistics(
    x: Tensor, weight: Tensor, labels: Tensor, first: int, scaling: str, numbers: Tensor | None
) -> tuple[Tensor, Tensor]:
    return slices.statistics(x, weight, labels, first, _on_slices(x), products_of(x, scaling, numbers=numbers))


@custom_op("megakernels::linear_slice_gradients", mutates_args=("numbers",))
def _linear_slice_gradients(
    grad_loss: Tensor, x: Tensor, weight: Tensor, labels: Tensor, lse: Tensor,
    first: int, ignore_index: int, scaling: str, gradient_format: str, numbers: Tensor | None, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    products = products_of(x, scaling, gradient_format, numbers, backward=True)
    return only_needed(slices.backward(grad_loss, x, weight, labels, lse, first, ignore_index, 0.0, needs, _on_slices(x), products))


def _on_slices(x: Tensor) -> slices.OnSlices:
    """Implementation of the slice functions: the kernels of `cross_entropy`, or plain torch."""
    return kernel_module(cross_entropy_reference) if runs_triton(x) else reference


@_linear_cross_entropy.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulator_dtype(x.dtype)
    return x.new_empty((), dtype=dtype), x.new_empty((x.shape[0],), dtype=dtype)


join(_linear_cross_entropy, _linear_cross_entropy_backward, outputs=("loss", "lse"), gradients=("x", "weight"))


@_linear_slice_statistics.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    made = x.new_empty((x.shape[0],), dtype=accumulator_dtype(x.dtype))
    return made, fake_like(made)


@_linear_slice_gradients.register_fake
def _(_grad_loss: Tensor, x: Tensor, weight: Tensor, *others: Any) -> list[Tensor]:
    return [fake_like(tensor) for tensor, need in zip((x, weight), others[-1], strict=True) if need]


def _of_forward(x: Tensor, weight: Tensor, *others: Any) -> int:
    return slices.forward_scratch_bytes(x, weight, next(each for each in others if isinstance(each, str)))


def _of_backward(_grad_loss: Tensor, x: Tensor, weight: Tensor, *others: Any) -> int:
    return slices.backward_scratch_bytes(x, weight, others[-1], next(each for each in others if isinstance(each, str)))


def _cost_of_backward(_grad_loss: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Cost:
    """Gradients overwrite the logits, so the kernel moves one operand twice."""
    return Cost({}, repeated_bytes=x.shape[0] * weight.shape[0] * x.element_size())


for _op in (_linear_cross_entropy, _linear_slice_statistics):
    register_scratch(_op, _of_forward)
for _op in (_linear_cross_entropy_backward, _linear_slice_gradients):
    register_scratch(_op, _of_backward)
    register_cost(_op, _cost_of_backward)
