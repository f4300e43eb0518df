"""y = factor · x² in plain torch."""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import upcast


def forward(x: Tensor, factor: float) -> Tensor:
    """The output in x's dtype."""
    wide = upcast(x)
    return (wide * wide * factor).to(x.dtype)


def backward(grad_y: Tensor, x: Tensor, factor: float, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of x, None if it is not needed."""
    return [(upcast(grad_y) * upcast(x) * (2 * factor)).to(x.dtype) if needs[0] else None]
