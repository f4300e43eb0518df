"""Gated and plain activations in plain torch, with explicit backward formulas.

Source: swiglu, Shazeer, arXiv:2002.05202, equation 5 (silu is its Swish with β = 1); relu2, So et al., arXiv:2109.08668, section 4; gelu in
the tanh form, Hendrycks and Gimpel, arXiv:1606.08415, section 2.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import upcast

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


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


def relu2_forward(x: Tensor) -> Tensor:
    """Returns max(x, 0)²."""
    return upcast(x).clamp(min=0).square().to(x.dtype).contiguous()


def relu2_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    """Returns ∂L/∂y · 2 · max(x, 0)."""
    return (2 * upcast(grad_y) * upcast(x).clamp(min=0)).to(x.dtype).contiguous()


def gelu_forward(x: Tensor) -> Tensor:
    """Returns x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    wide = upcast(x)
    return (0.5 * wide * (1 + torch.tanh(_gelu_inner(wide)))).to(x.dtype).contiguous()


def gelu_backward(grad_y: Tensor, x: Tensor) -> Tensor:
    """Returns ∂L/∂y · ½ · (1 + t + x · (1 − t²) · inner'), t the tanh above."""
    wide = upcast(x)
    tanh = torch.tanh(_gelu_inner(wide))
    slope = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * wide.square())
    return (upcast(grad_y) * 0.5 * (1 + tanh + wide * (1 - tanh.square()) * slope)).to(x.dtype).contiguous()


def _gelu_inner(x: Tensor) -> Tensor:
    return SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x.square())
