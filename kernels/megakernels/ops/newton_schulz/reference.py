"""Newton-Schulz steps in plain torch.

Products of symmetric matrices are made symmetric: an asymmetry would grow with every further product.
"""

import torch
from torch import Tensor

from megakernels.ops.newton_schulz.iteration import iterate


def product(
    a: Tensor, b: Tensor, out: Tensor,
    *, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0, scales: Tensor | None = None,
    tall: bool = False,
) -> None:  # fmt: skip
    """Writes scales · (alpha · a bᵀ + beta · added + diagonal · I) to `out` [n, r, r]; a bᵀ must be symmetric.

    Args:
        a: [n, r, c], or [n, c, r] if `tall`.
        b: The same shape.
        out: In any dtype.
        alpha: Factor of the product.
        added: Symmetric matrices [n, r, r], or None.
        beta: Factor of `added`.
        diagonal: Added to the diagonal.
        scales: Factors of the matrices, fp32 [n], or None.
        tall: True for aᵀ b.
    """
    left, right = (a.mT, b) if tall else (a, b.mT)
    if out.dtype in (torch.float32, torch.float64):
        wide = torch.bmm(left, right, out=out)
    elif a.is_cuda:
        wide = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        wide = torch.bmm(left.float(), right.float())
    if alpha != 1.0:
        wide.mul_(alpha)
    if added is not None:
        wide.add_(added, alpha=beta)
    if diagonal:
        wide.diagonal(dim1=1, dim2=2).add_(diagonal)
    if scales is not None:
        wide.mul_(scales.view(-1, 1, 1))
    if wide is not out:
        out.copy_(wide)
    del wide
    out.tril_()
    out.add_(out.tril(-1).mT)


def forward(x: Tensor, num_steps: int) -> None:
    """Makes the steps in x [n, rows, cols]."""
    iterate(x, num_steps, product)
