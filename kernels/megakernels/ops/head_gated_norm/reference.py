"""RMSNorm of each head, times its gate, in plain torch.

With n = x · rstd and a = silu(gate) or sigmoid(gate): y = n ⊙ weight ⊙ a.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import upcast


def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """The output in x's dtype and rstd [...] in the accumulation dtype."""
    wide = upcast(x)
    rstd = (wide.square().mean(-1) + eps).rsqrt()
    y = wide * rstd.unsqueeze(-1) * upcast(weight) * _activation(upcast(gate), sigmoid=sigmoid)
    return y.to(x.dtype), rstd


def backward(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, sigmoid: bool, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of x, gate and weight, None for those that are not needed."""
    grad, normed, wide_gate, scale = upcast(grad_y), upcast(x) * rstd.unsqueeze(-1), upcast(gate), upcast(weight)
    active = _activation(wide_gate, sigmoid=sigmoid)
    found: list[Tensor | None] = [None, None, None]
    if needs[0]:
        grad_normed = grad * scale * active
        grad_x = (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
        found[0] = grad_x.to(x.dtype)
    if needs[1]:
        share = torch.sigmoid(wide_gate)
        slope = share * (1 - share) if sigmoid else share * (1 + wide_gate * (1 - share))
        found[1] = (grad * normed * scale * slope).to(gate.dtype)
    if needs[2]:
        found[2] = (grad * normed * active).flatten(0, -2).sum(0).to(weight.dtype)
    return found


def _activation(gate: Tensor, *, sigmoid: bool) -> Tensor:
    return torch.sigmoid(gate) if sigmoid else torch.nn.functional.silu(gate)
