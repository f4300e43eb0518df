"""Linears of one input that multiply in eight bits, forward and backward.

Four operations without an autograd formula, which a caller with a process group puts collectives between. With `scaling` rows, each product
scales the rows of its first and the columns of its second operand; with tensor, whole matrices, and with delayed by factors that are given
(`delayed`). Inputs and weights are e4m3. With mxfp8 and nvfp4, blocks of the summed dim have scales, and products are emulated (`blocks`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import register_scratch
from megakernels.ops.fp8_linear import blocks, choice, inputs, reference, sizes
from megakernels.ops.fp8_linear.blocks import GRADIENT, INPUT
from megakernels.ops.fp8_linear.facts import BLOCKS, BlockLinears, padded
from megakernels.ops.fp8_linear.inputs import width_of

__all__ = ["fp8_input_gradients", "fp8_linears", "fp8_quantize", "fp8_weight_gradients"]


def fp8_quantize(x: Tensor, scaling: str, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The copy of a linear's input that is kept for its weight gradient.

    Args:
        x: [..., K], fp32 or bf16.
        scaling: tensor, delayed, columns for a scale of each column (a weight gradient scaled by rows multiplies it), or of blocks.
        numbers: The linear's numbers [3, 3] with delayed, whose largest magnitude of the input is raised; None otherwise.

    Returns:
        (float8_e4m3fn [..., K'], scale fp32 [1] or [K']), K' the next multiple of 16; with blocks the result of `blocks.kept`.

    Scratch:
        The maxima of x's tiles; in plain torch the slice of x that is being scaled; of blocks x in fp32, too.

    Triton:
        Three kernels: maxima of tiles, scales, and the rounded copy; with delayed one. The same bits as plain torch's where x is finite.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: torchao 0.18, `hp_tensor_to_float8_dynamic`.
    """
    inputs.check_quantize(x, scaling, numbers)
    found: tuple[Tensor, Tensor] = _fp8_quantize(x, scaling, numbers)
    return found


def fp8_linears(
    x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scaling: str,
    dtype: torch.dtype | None = None, largest: Sequence[Tensor | None] = (), numbers: Sequence[Tensor] = (), taken: slice | None = None,
) -> list[Tensor]:  # fmt: skip
    """Products x · weightᵀ + bias of several weights, multiplied in eight bits.

    Args:
        x: [..., K] in the weights' dtype; with a scale, the result of `fp8_quantize`.
        scale: scale of x if it is quantised already, with scaling tensor or delayed; None otherwise.
        weights: [N, K] each, fp32 or bf16, or packed (`weights.pack_weight`).
        biases: [N] each or None, added before rounding.
        scaling: tensor, rows, delayed, mxfp8, nvfp4 or fp8_blockwise.
        dtype: The results' dtype; None for the weights', of which none is packed then.
        largest: The largest magnitudes of each packed weight (`packing.facts.num_largest`), fp32, and for rows of a weight under nvfp4 the
            one over all its rows; None for others; may be empty.
        numbers: Numbers [3, 3] of each weight under delayed, the first's of x too, whose largest magnitudes are raised; or empty.
        taken: Rows of the only weight, of blocks, that multiply; the others are of the same blocks. None for all rows.

    Returns:
        [..., N] each, contiguous, in the weights' dtype.

    Scratch:
        x's copy unless it is given, and one weight's at a time.

    Triton:
        The copies of `fp8_quantize`; the products are torch's scaled matmul.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: torchao 0.18, `Float8Linear.forward`; the tensor cores may sum in less than fp32 here, and not in the gradients.
    """
    made = weights[0].dtype if dtype is None and weights else dtype
    inputs.check_linears(x, scale, weights, biases, scaling, made, largest, numbers, taken)
    given, rows = list(largest) or [None] * len(weights), [] if taken is None else [taken.start, taken.stop]
    found: list[Tensor] = _fp8_linears(x, scale, weights, biases, scaling, made, given, list(numbers), rows)
    return found


def fp8_input_gradients(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, gradient_format: str,
    largest: Sequence[Tensor | None] = (), numbers: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The gradient of the input of `fp8_linears`: the sum of gradient · weight.

    Args:
        gradients: [..., N] each.
        weights: [N, K] each, in the gradients' dtype, or packed for this product.
        scaling: tensor, rows, delayed, mxfp8, nvfp4 or fp8_blockwise.
        gradient_format: e4m3 or e5m2, in which the gradients multiply.
        largest: The largest magnitudes of packed weights, as `fp8_linears` takes them.
        numbers: The numbers of each weight, as `fp8_linears` takes them.

    Returns:
        [..., K], contiguous, in the gradients' dtype.

    Scratch:
        Copies of one gradient and its weight at a time, and from the second on their product.

    Triton:
        The copies of `fp8_quantize`, the weight's transposed; the products are torch's scaled matmul.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    inputs.check_input_gradients(gradients, weights, scaling, gradient_format, largest, numbers)
    given = list(largest) or [None] * len(weights)
    found: Tensor = _fp8_input_gradients(gradients, weights, scaling, gradient_format, given, list(numbers))
    return found


def fp8_weight_gradients(
    gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None,
    width: int, scaling: str, gradient_format: str, biases: Sequence[bool], numbers: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """The gradients of the weights, and of the biases, of `fp8_linears`.

    Args:
        gradients: [..., N] each.
        x: [..., K], or with its scale the result of `fp8_quantize`, with scaling columns if this scaling is rows.
        scale: scale of x if it is quantised; None otherwise.
        width: K.
        scaling: tensor, rows, delayed, mxfp8, nvfp4 or fp8_blockwise.
        gradient_format: e4m3 or e5m2, in which the gradients multiply.
        biases: true for each linear with a bias.
        numbers: The numbers of each weight, as `fp8_linears` takes them.

    Returns:
        [N, K] each, then [N] of each bias, contiguous, in the gradients' dtype.

    Scratch:
        x's transposed copy, and one gradient's at a time.

    Triton:
        The copies of `fp8_quantize`, transposed; the products are torch's scaled matmul.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    inputs.check_weight_gradients(gradients, x, scale, width, scaling, numbers)
    found: list[Tensor] = _fp8_weight_gradients(gradients, x, scale, width, scaling, gradient_format, biases, list(numbers))
    return found


@custom_op("megakernels::fp8_quantize", mutates_args=("numbers",))
def _fp8_quantize(x: Tensor, scaling: str, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
    data, scale = choice.kept(x.reshape(-1, x.shape[-1]), scaling, numbers)
    return data.view(*x.shape[:-1], -1), scale


@_fp8_quantize.register_fake
def _(x: Tensor, scaling: str, _numbers: Tensor | None) -> tuple[Tensor, Tensor]:
    columns = padded(x.shape[-1])
    if scaling in BLOCKS:
        rows = x.numel() // x.shape[-1]
        own = BlockLinears(rows, x.shape[-1], (), x.itemsize, scaling)
        shape = (*x.shape[:-1], own.kept_shape(rows)[1])
        return x.new_empty(shape, dtype=blocks.E4M3), x.new_empty(own.num_scales, dtype=blocks.E4M3)
    data = x.new_empty((*x.shape[:-1], columns), dtype=torch.float8_e4m3fn)
    return data, x.new_empty(columns if scaling == "columns" else 1, dtype=torch.float32)


@custom_op("megakernels::fp8_linears", mutates_args=("numbers",))
def _fp8_linears(
    x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scaling: str,
    dtype: torch.dtype, largest: Sequence[Tensor | None], numbers: Sequence[Tensor], taken: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    made = [x.new_empty((*x.shape[:-1], height), dtype=dtype) for height in sizes.heights(weights, taken)]
    each = inputs.numbers_of(numbers, weights)
    first = reference.Operand(rows, scale) if scale is not None else choice.operand(rows, scaling, INPUT, numbers=each[0])
    for weight, bias, out, whole, own in zip(weights, biases, made, largest, each, strict=True):
        second = choice.weight(weight, scaling, whole, numbers=own)
        second = second._replace(data=second.data[slice(*taken)]) if taken else second
        reference.multiply(first, second, out.view(-1, out.shape[-1]), bias, fast=True)
        del second
    return made


@_fp8_linears.register_fake
def _(
    x: Tensor, _scale: Tensor | None, weights: Sequence[Tensor], _biases: Sequence[Tensor | None], _scaling: str,
    dtype: torch.dtype, _largest: Sequence[Tensor | None], _numbers: Sequence[Tensor], taken: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty((*x.shape[:-1], height), dtype=dtype) for height in sizes.heights(weights, taken)]


@custom_op("megakernels::fp8_input_gradients", mutates_args=("numbers",))
def _fp8_input_gradients(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, gradient_format: str,
    largest: Sequence[Tensor | None], numbers: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    shape = (*gradients[0].shape[:-1], width_of(weights[0], scaling))
    total = gradients[0].new_empty(shape)
    rows = total.view(-1, shape[-1])
    each = inputs.numbers_of(numbers, weights)
    for index, (gradient, weight, whole, own) in enumerate(zip(gradients, weights, largest, each, strict=True)):
        matrix, dtype = gradient.reshape(-1, weight.shape[0]), inputs.FORMATS[gradient_format]
        first = choice.operand(matrix, scaling, GRADIENT, dtype=dtype, numbers=own)
        second = choice.weight(weight, scaling, whole, transposed=True, numbers=own)
        made = torch.empty_like(rows) if index else rows
        reference.multiply(first, second, made)
        if index:
            rows.add_(made)
        del first, second, made
    return total


@_fp8_input_gradients.register_fake
def _(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, _gradient_format: str,
    _largest: Sequence[Tensor | None], _numbers: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    return gradients[0].new_empty((*gradients[0].shape[:-1], width_of(weights[0], scaling)))


@custom_op("megakernels::fp8_weight_gradients", mutates_args=("numbers",))
def _fp8_weight_gradients(
    gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None,
    width: int, scaling: str, gradient_format: str, biases: Sequence[bool], numbers: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    made = [gradient.new_empty((gradient.shape[-1], width)) for gradient in gradients]
    sums = [gradient.new_empty(gradient.shape[-1]) for gradient, given in zip(gradients, biases, strict=True) if given]
    each = inputs.numbers_of(numbers, gradients)
    if scale is None:
        second = choice.operand(rows, scaling, INPUT, transposed=True, second=True, numbers=each[0])
    else:
        second = choice.turned(rows, scale, gradients[0], scaling, width)
    for gradient, out, own in zip(gradients, made, each, strict=True):
        matrix = gradient.reshape(-1, gradient.shape[-1])
        first = choice.operand(matrix, scaling, GRADIENT, dtype=inputs.FORMATS[gradient_format], transposed=True, numbers=own)
        reference.multiply(first, second, out)
        del first
    given = (gradient for gradient, has_bias in zip(gradients, biases, strict=True) if has_bias)
    for gradient, total in zip(given, sums, strict=True):
        torch.sum(gradient.reshape(-1, gradient.shape[-1]), 0, out=total)
    return [*made, *sums]


@_fp8_weight_gradients.register_fake
def _(
    gradients: Sequence[Tensor], _x: Tensor, _scale: Tensor | None,
    width: int, _scaling: str, _gradient_format: str, biases: Sequence[bool], _numbers: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    made = [gradient.new_empty((gradient.shape[-1], width)) for gradient in gradients]
    return [*made, *(gradient.new_empty(gradient.shape[-1]) for gradient, given in zip(gradients, biases, strict=True) if given)]


register_scratch(_fp8_quantize, sizes.quantize_scratch)
register_scratch(_fp8_linears, sizes.linears_scratch)
register_scratch(_fp8_input_gradients, sizes.input_gradients_scratch)
register_scratch(_fp8_weight_gradients, sizes.weight_gradients_scratch)
