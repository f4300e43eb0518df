"""Gated and plain activations in plain torch, with explicit backward formulas.

Source: swiglu and geglu, Shazeer, arXiv:2002.05202, equations 5 and 6 (silu is its Swish with β = 1); clamped swiglu, gpt-oss,
arXiv:2508.10925, section 2.1, and the code published with it; relu2, So et al., arXiv:2109.08668, section 4, with a gate relu2glu; gelu in
the tanh form, Hendrycks and Gimpel, arXiv:1606.08415, section 2; xielu, Huang and Schlag, arXiv:2411.13010, equation 12.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import upcast

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
XIELU_SLOPE = 0.5
"""Slope of xielu at zero."""
CLAMPED_SLOPE = 1.702
"""Slope of the clamped swiglu's sigmoid."""


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) · up in gate's dtype."""
    wide = upcast(gate)
    return (wide * torch.sigmoid(wide) * upcast(up)).to(gate.dtype).contiguous()


def swiglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of gate and up; silu'(g) = σ(g) · (1 + g · (1 − σ(g)))."""
    grad_y, wide = upcast(grad_y), upcast(gate)
    sigmoid = torch.sigmoid(wide)
    silu = wide * sigmoid
    grad_gate = (grad_y * upcast(up) * (sigmoid + silu * (1 - sigmoid))).to(gate.dtype).contiguous() if needs[0] else None
    grad_up = (grad_y * silu).to(up.dtype).contiguous() if needs[1] else None
    return grad_gate, grad_up


def geglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gelu(gate) · up in gate's dtype, gelu in the tanh form."""
    wide = upcast(gate)
    return (0.5 * wide * (1 + torch.tanh(_gelu_inner(wide))) * upcast(up)).to(gate.dtype).contiguous()


def geglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of gate and up."""
    grad_y, wide = upcast(grad_y), upcast(gate)
    tanh = torch.tanh(_gelu_inner(wide))
    grad_gate = (grad_y * upcast(up) * _gelu_slope(wide, tanh)).to(gate.dtype).contiguous() if needs[0] else None
    grad_up = (grad_y * 0.5 * wide * (1 + tanh)).to(up.dtype).contiguous() if needs[1] else None
    return grad_gate, grad_up


def clamped_swiglu_forward(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Returns g · σ(1.702 g) · (u + 1) in gate's dtype, g = min(gate, limit), u = up within ± limit."""
    wide, factor = upcast(gate).clamp(max=limit), upcast(up).clamp(-limit, limit) + 1
    return (wide * torch.sigmoid(CLAMPED_SLOPE * wide) * factor).to(gate.dtype).contiguous()


def clamped_swiglu_backward(grad_y: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up, zero where they are clamped."""
    grad_y, wide, inner = upcast(grad_y), upcast(gate), upcast(up)
    clamped, factor = wide.clamp(max=limit), inner.clamp(-limit, limit) + 1
    sigmoid = torch.sigmoid(CLAMPED_SLOPE * clamped)
    slope = sigmoid * (1 + CLAMPED_SLOPE * clamped * (1 - sigmoid))
    grad_gate = (grad_y * factor * slope).masked_fill_(wide > limit, 0)
    grad_up = (grad_y * clamped * sigmoid).masked_fill_(inner.abs() > limit, 0)
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(up.dtype).contiguous()


def relu2_forward(x: Tensor) -> Tensor:
    """Returns max(x, 0)²."""
    return upcast(x).clamp(min=0).square().to(x.dtype).contiguous()


def relu2_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    """Returns ∂L/∂y · 2 · max(x, 0)."""
    return (2 * upcast(grad_y) * upcast(x).clamp(min=0)).to(x.dtype).contiguous()


def relu2glu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Returns max(gate, 0)² · up in gate's dtype."""
    return (upcast(gate).clamp(min=0).square() * upcast(up)).to(gate.dtype).contiguous()


def relu2glu_backward(grad_y: Tensor, gate: Tensor, up: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of gate and up."""
    grad_y, positive = upcast(grad_y), upcast(gate).clamp(min=0)
    grad_gate = (2 * grad_y * upcast(up) * positive).to(gate.dtype).contiguous() if needs[0] else None
    grad_up = (grad_y * positive.square()).to(up.dtype).contiguous() if needs[1] else None
    return grad_gate, grad_up


def gelu_forward(x: Tensor) -> Tensor:
    """Returns x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    wide = upcast(x)
    return (0.5 * wide * (1 + torch.tanh(_gelu_inner(wide)))).to(x.dtype).contiguous()


def gelu_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    """Returns ∂L/∂y · ½ · (1 + t + x · (1 − t²) · inner'), t the tanh above."""
    wide = upcast(x)
    return (upcast(grad_y) * _gelu_slope(wide, torch.tanh(_gelu_inner(wide)))).to(x.dtype).contiguous()


def _gelu_slope(x: Tensor, tanh: Tensor) -> Tensor:
    return 0.5 * (1 + tanh + x * (1 - tanh.square()) * SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x.square()))


def xielu_forward(x: Tensor, alphas: Tensor) -> Tensor:
    """Returns a x² + x/2 for positive x, b (exp(x) − 1 − x) + x/2 for others."""
    wide, (above, below) = upcast(x), _xielu_factors(alphas)
    bent = torch.where(wide > 0, above * wide.square(), below * _xielu_bend(wide))
    return (bent + XIELU_SLOPE * wide).to(x.dtype).contiguous()


def xielu_backward(grad_y: Tensor, x: Tensor, alphas: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x and alphas."""
    grad_y, wide, (above, below) = upcast(grad_y), upcast(x), _xielu_factors(alphas)
    grad_x = grad_alphas = None
    if needs[0]:
        slope = torch.where(wide > 0, 2 * above * wide, below * torch.expm1(wide.clamp(max=0)))
        grad_x = (grad_y * (slope + XIELU_SLOPE)).to(x.dtype).contiguous()
    if needs[1]:
        sums = (grad_y * wide.clamp(min=0).square()).sum(), (grad_y * _xielu_bend(wide)).sum()
        grad_alphas = (torch.stack(sums) * torch.sigmoid(upcast(alphas))).to(alphas.dtype)
    return grad_x, grad_alphas


def _xielu_bend(x: Tensor) -> Tensor:
    below = x.clamp(max=0)
    return torch.expm1(below) - below


def _xielu_factors(alphas: Tensor) -> tuple[Tensor, Tensor]:
    above, below = softplus(upcast(alphas)).unbind()
    return above, below + XIELU_SLOPE


def _gelu_inner(x: Tensor) -> Tensor:
    return SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x.square())
