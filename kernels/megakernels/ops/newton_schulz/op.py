"""The symmetric product of Newton-Schulz iterations. No gradient."""

import torch
from torch import Tensor
from torch.library import custom_op

from megakernels._common import register_cost, require
from megakernels._common.device import module_for
from megakernels.ops.newton_schulz import reference
from megakernels.ops.newton_schulz.sizes import cost

__all__ = ["symmetric_product"]


def symmetric_product(x: Tensor, added: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """The matrices alpha · x xᵀ + beta · added.

    Args:
        x: [n, r, c].
        added: symmetric matrices [n, r, r] in x's dtype, or None; only their lower triangles may be read.
        alpha: factor of the product.
        beta: factor of `added`.

    Returns:
        [n, r, r], contiguous, in x's dtype.

    Triton:
        One kernel: the lower triangle's tiles, each stored twice.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    fits = x.dim() == 3 and (added is None or (added.shape == (x.shape[0], x.shape[1], x.shape[1]) and added.dtype == x.dtype))
    require(
        fits,
        "symmetric_product",
        "x must be [n,r,c], added [n,r,r] in x's dtype or None",
        x=x.shape,
        added=None if added is None else added.shape,
    )
    found: Tensor = _symmetric_product(x, added, alpha, beta)
    return found


@custom_op("megakernels::symmetric_product", mutates_args=())
def _symmetric_product(x: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    result: Tensor = module_for(x, reference).forward(x, added, alpha, beta)
    return result


@_symmetric_product.register_fake
def _(x: Tensor, _added: Tensor | None, _alpha: float, _beta: float) -> Tensor:
    return torch.empty((x.shape[0], x.shape[1], x.shape[1]), dtype=x.dtype, device=x.device)


register_cost(_symmetric_product, cost)
