"""Quantised copies in eight bits, and products of two of them.

An operand of a product is stored with the summed dim last, and has one scale for the whole matrix or one for each row, which becomes one
for each row or column of the result. A scale is a power of two: dividing by it is exact, so how an element rounds depends on the scale only
where the element is subnormal in the eight-bit format, for e4m3 below 2^-14 of the largest one. Scales of a part of a matrix therefore give
the same values as scales of the whole, and no maximum has to be reduced over ranks.

torch's scaled matmul takes dims that 16 divides; operands are padded with zeros to the next multiple.

Source: torchao 0.18, `float8_utils.py` (`amax_to_scale`, `_round_scale_down_to_power_of_2`) and `float8_linear.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernels.ops.fp8_linear.delayed import Delayed, record
from megakernels.ops.fp8_linear.facts import padded, slice_rows

SMALLEST = 1e-12
"""Lower bound of a maximum, as in torchao, so that a row of zeros has a scale too."""
_EXPONENT = 0x7F800000


class Operand(NamedTuple):
    """One side of a product.

    Attributes:
        data: Eight-bit [rows, summed], contiguous, padded with zeros; fp32 values where blocks have scales.
        scale: fp32 divisors of the elements: one, or one per row; None for values.
    """

    data: Tensor
    scale: Tensor | None


def has_tensor_cores(tensor: Tensor) -> bool:
    """True if torch's scaled matmul multiplies tensors of this device."""
    return tensor.is_cuda


def operand(
    x: Tensor, *, dtype: torch.dtype, by_row: bool, transposed: bool = False, second: bool = False, delayed: Delayed | None = None
) -> Operand:
    """Quantises a matrix for a product.

    Args:
        x: [rows, summed], or [summed, rows] if transposed; fp32 or bf16.
        dtype: The dtype of the copy.
        by_row: True if each row has a scale.
        transposed: True if the copy is x's transpose.
        second: True if the rows are columns of the result, and padded.
        delayed: Numbers of delayed scaling; None for a scale that follows from x.
    """
    found = x.mT if transposed else x
    rows, summed = found.shape
    shape = (padded(rows) if second else rows, padded(summed))
    data = (torch.empty if shape == (rows, summed) else torch.zeros)(shape, dtype=dtype, device=x.device)
    factor, scale = _factors(found, dtype, by_row, shape[0], delayed)
    inside = data[:rows, :summed]
    along = factor[None, :] if transposed or not by_row else factor[:, None]
    round_rows(x, along, inside.mT if transposed else inside, saturates=delayed is not None)
    return Operand(data, scale)


def kept(x: Tensor, *, by_column: bool, delayed: Delayed | None = None) -> tuple[Tensor, Tensor]:
    """The copy of a product's input that its weight gradient multiplies: e4m3 [rows, padded columns], and its scales [padded columns]."""
    rows, columns = x.shape
    shape = (rows, padded(columns))
    data = (torch.empty if shape == (rows, columns) else torch.zeros)(shape, dtype=torch.float8_e4m3fn, device=x.device)
    factor, scale = _factors(x.mT, torch.float8_e4m3fn, by_column, shape[1], delayed)
    round_rows(x, factor[None, :], data[:, :columns], saturates=delayed is not None)
    return data, scale


def turned(low: Tensor, scale: Tensor) -> Operand:
    """A kept copy [rows, columns] as the second operand of a product that sums over its rows."""
    rows, columns = low.shape
    shape = (columns, padded(rows))
    data = (torch.empty if shape[1] == rows else torch.zeros)(shape, dtype=low.dtype, device=low.device)
    data[:, :rows].copy_(low.mT)
    return Operand(data, scale)


def multiply(first: Operand, second: Operand, out: Tensor, bias: Tensor | None = None, *, fast: bool = False) -> None:
    """Writes first · secondᵀ [+ bias] into `out`, [rows of the first, at most rows of the second].

    On CUDA by torch's scaled matmul, elsewhere by a product in fp32 of the same eight-bit values; of values everywhere in fp32.

    Args:
        first: Rows of the result.
        second: Columns of the result.
        out: fp32 or bf16.
        bias: [columns], or None.
        fast: True if the tensor cores may sum in less than fp32, as torchao lets them in the forward.
    """
    columns = out.shape[1]
    if first.scale is None or second.scale is None:
        made = first.data @ second.data[:columns].mT
        out.copy_(made if bias is None else made.add_(bias))
        return
    if not has_tensor_cores(out):
        made = first.data.float() @ second.data[:columns].float().mT
        made *= first.scale[:, None] * second.scale[:columns] if first.scale.numel() > 1 else first.scale * second.scale[:columns]
        out.copy_(made if bias is None else made + bias)
        return
    whole = out if columns == second.data.shape[0] else out.new_empty((out.shape[0], second.data.shape[0]))
    _scaled(first, second, whole, bias if whole is out and out.dtype != torch.float32 else None, fast)
    if whole is not out:
        out.copy_(whole[:, :columns])
    if bias is not None and (whole is not out or out.dtype == torch.float32):
        out.add_(bias)


def _scaled(first: Operand, second: Operand, out: Tensor, bias: Tensor | None, fast: bool) -> None:
    assert first.scale is not None
    assert second.scale is not None
    by_row = first.scale.numel() > 1 or second.scale.numel() > 1
    if by_row and out.dtype == torch.float32:  # with one scale per row, it is made in bf16 only; powers of two are exact factors afterwards
        one = first.scale.new_ones(())
        torch._scaled_mm(first.data, second.data.mT, one, one, out_dtype=out.dtype, use_fast_accum=fast, out=out)
        out.mul_(first.scale.view(-1, 1)).mul_(second.scale.view(1, -1))
        return
    scales = (first.scale.view(-1, 1), second.scale.view(1, -1)) if by_row else (first.scale.view(()), second.scale.view(()))
    torch._scaled_mm(first.data, second.data.mT, *scales, bias=bias, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def _factors(x: Tensor, dtype: torch.dtype, by_row: bool, num_scales: int, delayed: Delayed | None) -> tuple[Tensor, Tensor]:
    """The factors of elements, in x's dtype or given in fp32, and the scales; 1 for padded rows."""
    if delayed is not None:
        record(x, delayed)
        return delayed.factor, delayed.factor.reciprocal()
    amax = torch.linalg.vector_norm(x, float("inf"), dim=1) if by_row else torch.linalg.vector_norm(x, float("inf")).view(1)
    factor = power_of_two(amax, dtype)
    scale = torch.ones(num_scales if by_row else 1, dtype=torch.float32, device=x.device)
    scale[: factor.numel()].copy_(1 / factor)
    return factor.to(x.dtype), scale


def power_of_two(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor of elements whose largest magnitude is `amax`, fp32, rounded down to a power of two; 0 for inf and inf for nan."""
    ratio = torch.finfo(dtype).max / amax.float().clamp_(min=SMALLEST)
    return (ratio.view(torch.int32) & _EXPONENT).view(torch.float32)


def round_rows(x: Tensor, factor: Tensor, out: Tensor, *, saturates: bool = False) -> None:
    """`x` times `factor`, which has a row for each of x's or one for all, rounded into `out`; products may be beyond its largest number."""
    limit = torch.finfo(out.dtype).max if saturates else None
    factors, step = factor.expand(x.shape[0], -1), slice_rows(*x.shape)
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        values = x[rows] * factors[rows]
        out[rows].copy_(values if limit is None else values.clamp_(-limit, limit))
        del values
