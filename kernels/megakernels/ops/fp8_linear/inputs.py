"""Validation of the arguments of products in eight bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import require
from megakernels.ops.fp8_linear.facts import BLOCKS

DTYPES = (torch.float32, torch.bfloat16)
SCALINGS = ("tensor", "rows", *BLOCKS)
KEPT_SCALINGS = ("tensor", "columns", *BLOCKS)
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def check_quantize(x: Tensor, scaling: str) -> None:
    """Refuse what `fp8_quantize` does not take."""
    fits = x.dim() > 1 and x.dtype in DTYPES and scaling in KEPT_SCALINGS
    require(
        fits,
        "fp8_quantize",
        "x must be fp32 or bf16 [...,K], scaling tensor, columns or of blocks",
        x=x.shape,
        dtype=x.dtype,
        scaling=scaling,
    )


def check_linears(x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scaling: str) -> None:
    """Refuse what `fp8_linears` does not take."""
    _check_weights("fp8_linears", weights, scaling)
    fits = len(biases) == len(weights) and all(
        bias is None or bias.shape == weight.shape[:1] for bias, weight in zip(biases, weights, strict=False)
    )
    require(fits, "fp8_linears", "biases must be [N] each or None, one for each weight", weights=len(weights), biases=len(biases))
    width = weights[0].shape[1]
    if scale is None:
        fits = x.dim() > 1 and x.dtype == weights[0].dtype and x.shape[-1] == width
    else:
        fits = x.dim() > 1 and x.dtype in FORMATS.values() and x.shape[-1] == -(-width // 16) * 16 and scaling == "tensor"
    expected = "x must be [...,K] in the weights' dtype, or with a scale what fp8_quantize makes with scaling tensor"
    require(fits, "fp8_linears", expected, x=x.shape, dtype=x.dtype, K=width, scaling=scaling)


def check_input_gradients(gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, gradient_format: str) -> None:
    """Refuse what `fp8_input_gradients` does not take."""
    _check_weights("fp8_input_gradients", weights, scaling)
    fits = len(gradients) == len(weights) and all(
        gradient.shape == (*gradients[0].shape[:-1], weight.shape[0]) for gradient, weight in zip(gradients, weights, strict=False)
    )
    require(
        fits and gradient_format in FORMATS,
        "fp8_input_gradients",
        "gradients must be [...,N] each, one for each weight, gradient_format e4m3 or e5m2",
        gradients=[tuple(gradient.shape) for gradient in gradients],
        gradient_format=gradient_format,
    )


def check_weight_gradients(gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None, width: int, scaling: str) -> None:
    """Refuse what `fp8_weight_gradients` does not take."""
    stored = width if scale is None else -(-width // 16) * 16 // (2 if scaling == "nvfp4" else 1)
    fits = bool(gradients) and x.shape[-1] == stored and (scale is None) == (x.dtype in DTYPES) and scaling in SCALINGS
    rows_fit = fits and all(gradient.shape[:-1] == x.shape[:-1] for gradient in gradients)
    require(
        rows_fit,
        "fp8_weight_gradients",
        "x must be [...,K], or with its scale what fp8_quantize makes of that, gradients [...,N] each",
        x=x.shape,
        dtype=x.dtype,
        K=width,
        scaling=scaling,
    )


def _check_weights(operation: str, weights: Sequence[Tensor], scaling: str) -> None:
    fits = bool(weights) and scaling in SCALINGS and all(weight.dim() == 2 and weight.dtype in DTYPES for weight in weights)
    fits = fits and all(weight.shape[1] == weights[0].shape[1] and weight.dtype == weights[0].dtype for weight in weights)
    found = [tuple(weight.shape) for weight in weights]
    require(fits, operation, "weights must be fp32 or bf16 [N,K] each, scaling tensor, rows or of blocks", weights=found, scaling=scaling)
