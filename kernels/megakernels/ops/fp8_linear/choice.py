"""Selects who makes copies: Triton kernels if enabled and rows are dense, else plain torch; emulated blocks are made by plain torch."""

from types import ModuleType

import torch
from torch import Tensor

from megakernels._common.device import module_for
from megakernels.ops.fp8_linear import blocks, reference, weights
from megakernels.ops.fp8_linear.delayed import delayed_of
from megakernels.ops.fp8_linear.facts import BLOCKS
from megakernels.ops.fp8_linear.reference import Operand
from megakernels.ops.fp8_linear.sizes import dense_rows


def chosen(x: Tensor, like: Tensor) -> ModuleType:
    """The module whose functions run for a matrix; `like` has the dtype of the copied tensor."""
    return module_for(like, reference) if dense_rows(x) else reference


def operand(
    x: Tensor, scaling: str, role: str,
    *, dtype: torch.dtype = blocks.E4M3, transposed: bool = False, second: bool = False, numbers: Tensor | None = None,
    largest: Tensor | None = None,
) -> Operand:  # fmt: skip
    """`reference.operand` or `kernel.operand`; of `scaling` in blocks the values, as `blocks.rounded` makes them in the operand's role.

    `numbers` are the linear's with scaling delayed, None otherwise; `largest` is the largest magnitude of the weight of which x is a part,
    for NVFP4.
    """
    if scaling in BLOCKS:
        return Operand(blocks.rounded(x, scaling, role, transposed=transposed, dtype=dtype, largest=largest), None)
    how = {"by_row": scaling == "rows", "transposed": transposed, "second": second, "delayed": delayed_of(numbers, role)}
    found: Operand = chosen(x, x).operand(x, dtype=dtype, **how)
    return found


def kept(x: Tensor, scaling: str, numbers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`reference.kept` or `kernel.kept`; or `blocks.kept`."""
    if scaling in BLOCKS:
        return blocks.kept(x, scaling)
    found: tuple[Tensor, Tensor] = chosen(x, x).kept(x, by_column=scaling == "columns", delayed=delayed_of(numbers, blocks.INPUT))
    return found


def turned(low: Tensor, scale: Tensor, like: Tensor, scaling: str, width: int) -> Operand:
    """`reference.turned` or `kernel.turned`; or `blocks.restored`."""
    if scaling in BLOCKS:
        return Operand(blocks.restored(low, scale, width, scaling), None)
    found: Operand = chosen(low, like).turned(low, scale)
    return found


def weight(matrix: Tensor, scaling: str, largest: Tensor | None, *, transposed: bool = False, numbers: Tensor | None = None) -> Operand:
    """The second operand of a product with a weight, of `weights.unpacked` if the weight is packed."""
    if matrix.dtype == torch.uint8:
        given = delayed_of(numbers, blocks.WEIGHT)
        return weights.unpacked(matrix, scaling, largest if given is None else given.factor, turned=transposed)
    return operand(matrix, scaling, blocks.WEIGHT, transposed=transposed, second=True, numbers=numbers, largest=largest)
