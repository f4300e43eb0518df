"""Bytes that the products hold inside themselves on CUDA, for given tensors, by the facts of their sizes."""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import chooses_triton
from megakernels.ops.fp8_linear.facts import BLOCKS, BY_COLUMN, WHOLE, BlockLinears, ScaledLinears, making_bytes


def dense_rows(x: Tensor) -> bool:
    """True if the kernels read this matrix: rows with dense elements."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def quantize_scratch(x: Tensor, scaling: str) -> int:
    """Bytes inside `fp8_quantize`."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    if scaling in BLOCKS:
        return BlockLinears(rows, columns, (), x.itemsize, scaling).keeping_bytes(rows)
    return making_bytes(rows, columns, BY_COLUMN if scaling == "columns" else WHOLE, x.itemsize, fused=_fused(x))


def linears_scratch(x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], _biases: object, scaling: str) -> int:
    """Bytes inside `fp8_linears`."""
    width, outs = weights[0].shape[1], tuple(weight.shape[0] for weight in weights)
    rows, fused = x.numel() // x.shape[-1], _fused(*weights, *((x,) if scale is None else ()))
    return _linears(rows, width, outs, weights[0].itemsize, scaling, fused=fused).forward_bytes(given=scale is not None)


def input_gradients_scratch(gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, _gradient_format: str) -> int:
    """Bytes inside `fp8_input_gradients`."""
    width, outs = weights[0].shape[1], tuple(weight.shape[0] for weight in weights)
    rows, size = gradients[0].numel() // outs[0], weights[0].itemsize
    return _linears(rows, width, outs, size, scaling, fused=_fused(*gradients, *weights)).input_gradient_bytes


def weight_gradients_scratch(
    gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None, width: int, scaling: str, _gradient_format: str, _biases: object
) -> int:
    """Bytes inside `fp8_weight_gradients`."""
    rows, outs = x.numel() // x.shape[-1], tuple(gradient.shape[-1] for gradient in gradients)
    fused = _fused(*gradients, *((x,) if scale is None else ()))
    return _linears(rows, width, outs, gradients[0].itemsize, scaling, fused=fused).weight_gradient_bytes(given=scale is not None)


def _linears(rows: int, width: int, outs: tuple[int, ...], itemsize: int, scaling: str, *, fused: bool) -> ScaledLinears | BlockLinears:
    if scaling in BLOCKS:
        return BlockLinears(rows, width, outs, itemsize, scaling)
    return ScaledLinears(rows, width, outs, itemsize, scaling == "rows", fused)


def _fused(*operands: Tensor) -> bool:
    """True if the Triton kernels make the copies of all operands."""
    return chooses_triton(operands[0]) and all(dense_rows(each) for each in operands)
