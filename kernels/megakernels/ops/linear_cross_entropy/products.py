"""Products of a slice of the vocabulary: in the rows' dtype, or in the format of a low-precision recipe.

In fewer bits the rows are quantised once a pass, for the logits and, turned, for the weight's gradient; a slice of the weight and of the
logits' gradient is quantised for each product. Slices consist of whole blocks of scales.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megakernels._common import upcast
from megakernels.ops.fp8_linear import choice
from megakernels.ops.fp8_linear.blocks import GRADIENT, INPUT
from megakernels.ops.fp8_linear.inputs import FORMATS
from megakernels.ops.fp8_linear.reference import Operand, multiply


class Products(Protocol):
    """Products of the rows x [N, h] with slices of the weight [W, h]."""

    def logits(self, part: Tensor) -> Tensor:
        """The logits x partᵀ, [N, W] in x's dtype."""

    def add(self, total: Tensor, grad: Tensor, part: Tensor) -> None:
        """Adds grad part to `total` [N, h]."""

    def outer(self, grad: Tensor, out: Tensor) -> None:
        """Writes gradᵀ x into `out` [W, h]."""


class Wide(NamedTuple):
    """Products in the rows' dtype."""

    x: Tensor

    def logits(self, part: Tensor) -> Tensor:
        """The product of a slice."""
        return self.x @ part.mT

    def add(self, total: Tensor, grad: Tensor, part: Tensor) -> None:
        """Adds in total's dtype: CUDA multiplies bf16 into fp32; on a CPU the operands are widened."""
        if grad.device.type != "cpu" and grad.dtype != total.dtype:
            total += torch.mm(grad, part, out_dtype=total.dtype)
        else:
            total.addmm_(upcast(grad), upcast(part))

    def outer(self, grad: Tensor, out: Tensor) -> None:
        """The slice of the weight's gradient."""
        torch.mm(grad.mT, self.x, out=out)


class Narrow(NamedTuple):
    """Products in a recipe's format.

    Attributes:
        like: The rows' shape, dtype and device.
        rows: The rows as an operand.
        columns: The transposed rows, for the backward; None in the forward.
        scaling: Scaling of `fp8_linears`.
        gradient_format: e4m3 or e5m2, in which the gradient of logits multiplies.
        numbers: The head's numbers of delayed scaling; None for others.
    """

    like: Tensor
    rows: Operand
    columns: Operand | None
    scaling: str
    gradient_format: str
    numbers: Tensor | None = None

    def logits(self, part: Tensor) -> Tensor:
        """The product of a slice."""
        out = self.like.new_empty((self.like.shape[0], part.shape[0]))
        multiply(self.rows, choice.weight(part, self.scaling, None, numbers=self.numbers), out, fast=True)
        return out

    def add(self, total: Tensor, grad: Tensor, part: Tensor) -> None:
        """Adds a product in fp32."""
        first = choice.operand(grad, self.scaling, GRADIENT, dtype=FORMATS[self.gradient_format], numbers=self.numbers)
        second = choice.weight(part, self.scaling, None, transposed=True, numbers=self.numbers)
        if first.scale is None:
            total.addmm_(first.data, second.data[: total.shape[1]].mT)
            return
        made = torch.empty_like(total)
        multiply(first, second, made)
        total.add_(made)

    def outer(self, grad: Tensor, out: Tensor) -> None:
        """The slice of the weight's gradient."""
        assert self.columns is not None
        dtype = FORMATS[self.gradient_format]
        first = choice.operand(grad, self.scaling, GRADIENT, dtype=dtype, transposed=True, numbers=self.numbers)
        multiply(first, self.columns, out)


def products_of(x: Tensor, scaling: str, gradient_format: str = "", numbers: Tensor | None = None, *, backward: bool = False) -> Products:
    """The products of rows; `scaling` is empty for products in the operands' dtype, `numbers` are for delayed scaling."""
    if not scaling:
        return Wide(x)
    columns = choice.operand(x, scaling, INPUT, transposed=True, second=True, numbers=numbers) if backward else None
    return Narrow(x, choice.operand(x, scaling, INPUT, numbers=numbers), columns, scaling, gradient_format, numbers)
