"""Root-mean-square norm and its gated, grouped form in plain torch, with explicit backward formulas.

x̂ = x · r with r = (mean(x²) + ε)^(−1/2), y = x̂ ⊙ w; w is the weight, plus an offset if one is given. With g = ∂L/∂y ⊙ w:
∂L/∂x = r · (g − x̂ · mean(g ⊙ x̂)), ∂L/∂w = Σ_rows ∂L/∂y ⊙ x̂.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4; the gate before the norm as in Mamba-2,
arXiv:2405.21060, section 7.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import upcast


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns y [..., D] in x's dtype and rstd [...]."""
    wide = upcast(x)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd.unsqueeze(-1) * _gain(weight, offset)).to(x.dtype).contiguous(), rstd.contiguous()


def rms_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    needs: Sequence[bool],
    mean_dot: Tensor | None = None,
    offset: float = 0.0,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x and weight, None where not needed.

    `mean_dot`: mean of g ⊙ x̂ [..., 1], if it is over more than the given slice.
    """
    grad_y = upcast(grad_y)
    normed = upcast(x) * rstd.unsqueeze(-1)
    grad_x = grad_weight = None
    if needs[0]:
        scaled = grad_y * _gain(weight, offset)
        mean = (scaled * normed).mean(-1, keepdim=True) if mean_dot is None else mean_dot
        grad_x = ((scaled - normed * mean) * rstd.unsqueeze(-1)).to(x.dtype).contiguous()
    if needs[1]:
        grad_weight = (grad_y * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x, grad_weight


def add_rms_norm_forward(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x + branch and its y, [..., D] in x's dtype, and rstd [...]."""
    total = (x + branch).contiguous()
    return total, *rms_norm_forward(total, weight, eps)


def add_rms_norm_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of either term and of weight, None where not needed; includes the additional gradient of the sum."""
    grad_x, grad_weight = rms_norm_backward(grad_y, total, weight, rstd, needs)
    return None if grad_x is None else grad_x + grad_total, grad_weight


def gated_rms_norm_forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> tuple[Tensor, Tensor]:
    """Returns y [..., D] in x's dtype and rstd [..., num_groups]."""
    gated = _slices(_gated(x, gate), num_groups)
    rstd = torch.rsqrt(gated.square().mean(-1) + eps)
    return _scaled(gated, weight, rstd, x.dtype), rstd.contiguous()


def gated_rms_norm_backward(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor,
    num_groups: int, needs: Sequence[bool],
    mean_dot: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of x, gate and weight, None where not needed.

    `mean_dot`: mean of g ⊙ x̂ [..., num_groups], if it is over more than the given slice.
    """
    grad_y, wide_x, wide_gate = upcast(grad_y), upcast(x), upcast(gate)
    sigmoid = torch.sigmoid(wide_gate)
    silu = wide_gate * sigmoid
    normed = _slices(wide_x * silu, num_groups) * rstd.unsqueeze(-1)
    grad_x = grad_gate = grad_weight = None
    if needs[0] or needs[1]:
        scaled = _slices(grad_y * upcast(weight), num_groups)
        mean = (scaled * normed).mean(-1, keepdim=True) if mean_dot is None else mean_dot.unsqueeze(-1)
        grad_gated = ((scaled - normed * mean) * rstd.unsqueeze(-1)).flatten(-2)
        if needs[0]:
            grad_x = (grad_gated * silu).to(x.dtype).contiguous()
        if needs[1]:
            grad_gate = (grad_gated * wide_x * (sigmoid + silu * (1 - sigmoid))).to(gate.dtype).contiguous()
    if needs[2]:
        grad_weight = (grad_y * normed.flatten(-2)).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x, grad_gate, grad_weight


def row_square_sum(x: Tensor) -> Tensor:
    """Returns the sum of squares of the row [..., 1]."""
    return upcast(x).square().sum(-1, keepdim=True)


def row_scale(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Returns y [..., D] in x's dtype, with rstd [..., 1] as given."""
    return (upcast(x) * rstd * upcast(weight)).to(x.dtype).contiguous()


def row_dot(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Returns the sum of g ⊙ x̂ over the row [..., 1]."""
    return (upcast(grad_y) * upcast(weight) * upcast(x)).sum(-1, keepdim=True) * rstd


def gated_square_sum(x: Tensor, gate: Tensor) -> Tensor:
    """Returns the sum of squares of the gated row [..., 1]."""
    return _gated(x, gate).square().sum(-1, keepdim=True)


def gated_scale(x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Returns y [..., D] in x's dtype, with rstd [..., 1] as given."""
    return _scaled(_slices(_gated(x, gate), 1), weight, rstd, x.dtype)


def gated_dot(grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Returns the sum of g ⊙ x̂ over the row [..., 1]."""
    return (upcast(grad_y) * upcast(weight) * _gated(x, gate)).sum(-1, keepdim=True) * rstd


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    wide_gate = upcast(gate)
    return upcast(x) * wide_gate * torch.sigmoid(wide_gate)


def _scaled(gated: Tensor, weight: Tensor, rstd: Tensor, dtype: torch.dtype) -> Tensor:
    return ((gated * rstd.unsqueeze(-1)).flatten(-2) * upcast(weight)).to(dtype).contiguous()


def _gain(weight: Tensor, offset: float) -> Tensor:
    return upcast(weight) + offset if offset else upcast(weight)


def _slices(x: Tensor, num_groups: int) -> Tensor:
    return torch.unflatten(x, -1, (num_groups, x.shape[-1] // num_groups))
