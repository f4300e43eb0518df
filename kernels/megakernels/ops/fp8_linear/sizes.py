"""Bytes that the products hold inside themselves on CUDA, for given tensors, by the facts of their sizes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import chooses_triton
from megakernels.ops.fp8_linear.facts import (
    BLOCKS,
    BY_COLUMN,
    DELAYED,
    GIVEN,
    WHOLE,
    BlockLinears,
    ScaledLinears,
    low_linears,
    making_bytes,
)
from megakernels.ops.fp8_linear.inputs import width_of


def dense_rows(x: Tensor) -> bool:
    """True if the kernels read this matrix: rows with dense elements."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def quantize_scratch(x: Tensor, scaling: str, _numbers: object) -> int:
    """Bytes inside `fp8_quantize`."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    if scaling in BLOCKS:
        return BlockLinears(rows, columns, (), x.itemsize, scaling).keeping_bytes()
    return making_bytes(rows, columns, {"columns": BY_COLUMN, DELAYED: GIVEN}.get(scaling, WHOLE), x.itemsize, fused=_fused(x))


def linears_scratch(
    x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], _biases: object, scaling: str, dtype: torch.dtype,
    _largest: object, _numbers: object, taken: Sequence[int],
) -> int:  # fmt: skip
    """Bytes inside `fp8_linears`."""
    rows, fused = x.numel() // x.shape[-1], _fused(*_whole(weights), *((x,) if scale is None else ()))
    made = _linears(rows, weights, dtype.itemsize, scaling, fused=fused)
    if taken and isinstance(made, BlockLinears):
        return made.product_bytes(weights[0].shape[0], taken[1] - taken[0], packed=any(made.packed))
    return made.forward_bytes(given=scale is not None)


def heights(weights: Sequence[Tensor], taken: Sequence[int]) -> list[int]:
    """Rows of each weight that multiply, where some of the only one's may be `taken`."""
    return [taken[1] - taken[0]] if taken else [weight.shape[0] for weight in weights]


def input_gradients_scratch(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, _gradient_format: str, *_given: object
) -> int:
    """Bytes inside `fp8_input_gradients`."""
    rows, size = gradients[0].numel() // weights[0].shape[0], gradients[0].itemsize
    return _linears(rows, weights, size, scaling, fused=_fused(*gradients, *_whole(weights))).input_gradient_bytes


def weight_gradients_scratch(
    gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None, width: int, scaling: str, *_given: object
) -> int:
    """Bytes inside `fp8_weight_gradients`."""
    rows, outs = x.numel() // x.shape[-1], tuple(gradient.shape[-1] for gradient in gradients)
    fused = _fused(*gradients, *((x,) if scale is None else ()))
    size = gradients[0].itemsize
    return low_linears((rows, width, outs, size), scaling, fused=fused).weight_gradient_bytes(given=scale is not None)


def _linears(rows: int, weights: Sequence[Tensor], itemsize: int, scaling: str, *, fused: bool) -> ScaledLinears | BlockLinears:
    width, outs = width_of(weights[0], scaling), tuple(weight.shape[0] for weight in weights)
    packed = tuple(weight.dtype == torch.uint8 for weight in weights)
    return low_linears((rows, width, outs, itemsize), scaling, fused=fused, packed=packed)


def _whole(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights that are not packed, of which copies are made."""
    return [weight for weight in weights if weight.dtype != torch.uint8]


def _fused(*operands: Tensor) -> bool:
    """True if the Triton kernels make the copies of all operands."""
    return bool(operands) and chooses_triton(operands[0]) and all(dense_rows(each) for each in operands)
