"""Accumulation dtype and bounded scratch."""

from collections.abc import Iterator

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an operation computes: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(tensor: Tensor) -> Tensor:
    """`tensor` in its accumulation dtype; the tensor itself when it already has it, so never write into the result."""
    return tensor.to(accumulator_dtype(tensor.dtype))


def span_sums(values: Tensor) -> Tensor:
    """Sums over spans of positions: [..., Q] -> [..., Q, Q], at i, j the sum of the values after j up to i, 0 where i ≤ j.

    Each is a sum of its own terms, so its rounding is relative to itself. A difference of two running sums has the rounding of the larger.

    Source: `segsum` of arXiv:2405.21060, listing 1.
    """
    length = values.shape[-1]
    return values.unsqueeze(-1).expand(*values.shape, length).tril(-1).cumsum_(-2)


def row_blocks(num_rows: int, elements_per_row: int, limit_elements: int, largest: int | None = None) -> Iterator[slice]:
    """Half-open row blocks that cover `num_rows`, each at most `limit_elements` of scratch (at least one row)."""
    rows = max(1, limit_elements // max(1, elements_per_row))
    if largest is not None:
        rows = min(rows, largest)
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))
