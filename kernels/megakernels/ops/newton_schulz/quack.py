"""Symmetric products by quack-kernels, an optional package: which it takes, and the call."""

from typing import Any

import torch
from torch import Tensor

from megakernels.libraries import HOPPER, QUACK, loaded, uses_library
from megakernels.ops.newton_schulz.facts import in_quack


def runs(a: Tensor, out: Tensor, scales: Tensor | None, diagonal: float, *, tall: bool) -> bool:
    """True if the package makes this product: the process uses it, its table has the call, and it is there on this device.

    The term added to the diagonal is rounded once more, which is too coarse in bf16: errors of steps double.
    """
    taken = in_quack(out.shape[1], a.shape[1 if tall else 2], a.element_size(), scaled=scales is not None)
    return taken and (not diagonal or out.dtype is torch.float16) and uses_library(QUACK) and _is_able(a.device)


def _is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER and loaded(QUACK).module is not None


def product(
    a: Tensor, b: Tensor, out: Tensor,
    *, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0, tall: bool = False,
) -> None:  # fmt: skip
    """Follows the contract of `reference.product`, without scales; the term added to the diagonal is rounded once more."""
    left, right = (a.mT, b) if tall else (a, b.mT)
    functions: Any = loaded(QUACK).module
    functions.gemm_symmetric(left, right, C=added, out=out, alpha=alpha, beta=beta if added is not None else 1.0)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)
