"""Selects who makes copies in eight bits: Triton kernels if enabled and rows are dense, else plain torch."""

from types import ModuleType
from typing import Any

from torch import Tensor

from megakernels._common.device import module_for
from megakernels.ops.fp8_linear import reference
from megakernels.ops.fp8_linear.reference import Operand
from megakernels.ops.fp8_linear.sizes import dense_rows


def chosen(x: Tensor, like: Tensor) -> ModuleType:
    """The module whose functions run for a matrix; `like` has the dtype of what it is, or is, a copy of."""
    return module_for(like, reference) if dense_rows(x) else reference


def operand(x: Tensor, **how: Any) -> Operand:
    """`reference.operand` or `kernel.operand`."""
    found: Operand = chosen(x, x).operand(x, **how)
    return found


def kept(x: Tensor, *, by_column: bool) -> tuple[Tensor, Tensor]:
    """`reference.kept` or `kernel.kept`."""
    found: tuple[Tensor, Tensor] = chosen(x, x).kept(x, by_column=by_column)
    return found


def turned(low: Tensor, scale: Tensor, like: Tensor) -> Operand:
    """`reference.turned` or `kernel.turned`."""
    found: Operand = chosen(low, like).turned(low, scale)
    return found
