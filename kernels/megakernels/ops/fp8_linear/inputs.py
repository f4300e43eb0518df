"""Validation of the arguments of products in eight bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import require
from megakernels.ops.fp8_linear.facts import BLOCKS, DELAYED, DELAYED_NUMBERS, DELAYED_ROLES, ONE_SCALE
from megakernels.ops.fp8_linear.packing.facts import PACKED_ROWS, unpacked_columns

DTYPES = (torch.float32, torch.bfloat16)
SCALINGS = ("tensor", "rows", DELAYED, *BLOCKS)
KEPT_SCALINGS = ("tensor", "columns", DELAYED, *BLOCKS)
OWN_SCALES = ("mxfp8", DELAYED)
"""Scalings whose packed weights need no largest magnitudes."""
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def check_quantize(x: Tensor, scaling: str, numbers: Tensor | None) -> None:
    """Raise for arguments that `fp8_quantize` does not support."""
    fits = x.dim() > 1 and x.dtype in DTYPES and scaling in KEPT_SCALINGS
    check_numbers("fp8_quantize", scaling, () if numbers is None else (numbers,), 1)
    require(
        fits,
        "fp8_quantize",
        "x must be fp32 or bf16 [...,K], scaling tensor, delayed, columns or of blocks",
        x=x.shape,
        dtype=x.dtype,
        scaling=scaling,
    )


def check_numbers(operation: str, scaling: str, numbers: Sequence[Tensor], count: int) -> None:
    """Refuse other numbers of delayed scaling than of so many linears, and any for other scalings."""
    fits = len(numbers) == (count if scaling == DELAYED else 0) and all(
        each.shape == (DELAYED_NUMBERS, DELAYED_ROLES) and each.dtype == torch.float32 for each in numbers
    )
    require(
        fits,
        operation,
        "with scaling delayed each weight must have fp32 numbers [3,3], with others none",
        scaling=scaling,
        numbers=[tuple(each.shape) for each in numbers],
    )


def numbers_of(numbers: Sequence[Tensor], each: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The numbers of each of these linears; None for each without."""
    return numbers or [None] * len(each)


def width_of(weight: Tensor, scaling: str) -> int:
    """Columns of a weight, packed or not."""
    return unpacked_columns(weight.shape[1], scaling) if weight.dtype == torch.uint8 else weight.shape[1]


def check_linears(
    x: Tensor, scale: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor | None], scaling: str,
    dtype: torch.dtype | None, largest: Sequence[Tensor | None], numbers: Sequence[Tensor], taken: slice | None,
) -> None:  # fmt: skip
    """Raise for arguments that `fp8_linears` does not support."""
    check_numbers("fp8_linears", scaling, numbers, len(weights))
    _check_weights("fp8_linears", weights, scaling, dtype, largest)
    fits = taken is None or (scaling in BLOCKS and len(weights) == 1 and 0 <= taken.start < taken.stop <= weights[0].shape[0])
    require(fits, "fp8_linears", "rows may be taken of one weight of blocks", weights=len(weights), scaling=scaling, taken=taken)
    fits = len(biases) == len(weights) and all(
        bias is None or bias.shape == weight.shape[:1] for bias, weight in zip(biases, weights, strict=False)
    )
    require(fits, "fp8_linears", "biases must be [N] each or None, one for each weight", weights=len(weights), biases=len(biases))
    width = width_of(weights[0], scaling)
    if scale is None:
        fits = x.dim() > 1 and x.dtype == dtype and x.shape[-1] == width
    else:
        fits = x.dim() > 1 and x.dtype in FORMATS.values() and x.shape[-1] == -(-width // 16) * 16 and scaling in ONE_SCALE
    expected = "x must be [...,K] in the weights' dtype, or with a scale the result of fp8_quantize with scaling tensor or delayed"
    require(fits, "fp8_linears", expected, x=x.shape, dtype=x.dtype, K=width, scaling=scaling)


def check_input_gradients(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: str, gradient_format: str,
    largest: Sequence[Tensor | None], numbers: Sequence[Tensor],
) -> None:  # fmt: skip
    """Raise for arguments that `fp8_input_gradients` does not support."""
    check_numbers("fp8_input_gradients", scaling, numbers, len(weights))
    _check_weights("fp8_input_gradients", weights, scaling, gradients[0].dtype if gradients else None, largest)
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


def check_weight_gradients(
    gradients: Sequence[Tensor], x: Tensor, scale: Tensor | None, width: int, scaling: str, numbers: Sequence[Tensor]
) -> None:
    """Raise for arguments that `fp8_weight_gradients` does not support."""
    check_numbers("fp8_weight_gradients", scaling, numbers, len(gradients))
    stored = width if scale is None else -(-width // 16) * 16 // (2 if scaling == "nvfp4" else 1)
    fits = bool(gradients) and x.shape[-1] == stored and (scale is None) == (x.dtype in DTYPES) and scaling in SCALINGS
    rows_fit = fits and all(gradient.shape[:-1] == x.shape[:-1] for gradient in gradients)
    require(
        rows_fit,
        "fp8_weight_gradients",
        "x must be [...,K], or with its scale the result of fp8_quantize, gradients [...,N] each",
        x=x.shape,
        dtype=x.dtype,
        K=width,
        scaling=scaling,
    )


def _check_weights(
    operation: str, weights: Sequence[Tensor], scaling: str, dtype: torch.dtype | None, largest: Sequence[Tensor | None]
) -> None:
    fits = bool(weights) and scaling in SCALINGS and dtype in DTYPES and all(weight.dim() == 2 for weight in weights)
    fits = fits and all(weight.dtype in (dtype, *((torch.uint8,) if scaling in PACKED_ROWS else ())) for weight in weights)
    fits = fits and all(width_of(weight, scaling) == width_of(weights[0], scaling) for weight in weights)
    found = [tuple(weight.shape) for weight in weights]
    expected = "weights must be fp32 or bf16 [N,K] each, or packed, scaling tensor, rows, delayed or of blocks"
    require(fits, operation, expected, weights=found, scaling=scaling, dtype=dtype)
    given = largest or [None] * len(weights)
    needs = [weight.dtype == torch.uint8 and scaling not in OWN_SCALES for weight in weights]
    fits = len(given) == len(weights) and all(each is not None or not needed for each, needed in zip(given, needs, strict=False))
    require(fits, operation, "packed weights need their largest magnitudes", weights=found, scaling=scaling, largest=len(largest))
