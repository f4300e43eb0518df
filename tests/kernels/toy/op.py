"""The scaled square. Saved: x."""

from megakernels.ops.toy import reference
from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, join, only_needed
from megakernels._common.device import module_for

__all__ = ["toy_square"]


def toy_square(x: Tensor, factor: float) -> Tensor:
    """Factor times the square of x.

    Args:
        x: [...].
        factor: scale of the output.

    Returns:
        [...], contiguous, in x's dtype.

    Triton:
        One kernel forward, one backward.

    Source: a toy.
    """
    y: Tensor = _toy_square(x, factor)
    return y


@custom_op("megakernels::toy_square", mutates_args=())
def _toy_square(x: Tensor, factor: float) -> Tensor:
    return module_for(x, reference).forward(x, factor).contiguous()


@custom_op("megakernels::toy_square_backward", mutates_args=())
def _toy_square_backward(grad_y: Tensor, x: Tensor, factor: float, needs: list[bool]) -> list[Tensor]:
    return only_needed(module_for(x, reference).backward(grad_y, x, factor, needs))


@_toy_square.register_fake
def _(x: Tensor, _factor: float) -> Tensor:
    return fake_like(x)


join(_toy_square, _toy_square_backward, outputs=("y",), gradients=("x",))
