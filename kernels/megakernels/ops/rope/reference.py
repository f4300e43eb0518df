"""Rotary position embedding in plain torch, half-split convention.

A head's last R dims are two halves (u, v): (u, v) → (u · cos − v · sin, v · cos + u · sin). The backward is the rotation by the opposite
angle.

Source: Su et al., arXiv:2104.09864, equation 34, with dims paired as (i, i + R/2); the shared rotary key of multi-head latent attention,
DeepSeek-V2, arXiv:2405.04434, equations 14-16.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import upcast


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """X [B, T, H, D] with its last R dims rotated by the angles of cos, sin [T, R/2], or with `back`, for gradients, by their opposites."""
    return _rotate(x, cos, -sin if back else sin)


def mla_kv_forward(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [B, T, H, n+R] and values [B, T, H, v] from kv [B, T, H, n+v] and the shared k_rope [B, T, R]."""
    rotated = _rotate(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, kv.shape[2], -1)
    return torch.cat([kv[..., :nope_dim], rotated], dim=-1).contiguous(), kv[..., nope_dim:].clone(memory_format=torch.contiguous_format)


def mla_kv_backward(
    grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, nope_dim: int, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of kv and k_rope; the shared key sums its heads before it is rotated back."""
    grad_kv = torch.cat([grad_k[..., :nope_dim], grad_v], dim=-1).contiguous() if needs[0] else None
    grad_k_rope = None
    if needs[1]:
        summed = upcast(grad_k[..., nope_dim:]).sum(2, keepdim=True)
        grad_k_rope = _rotate(summed, cos, -sin).squeeze(2).to(grad_k.dtype).contiguous()
    return grad_kv, grad_k_rope


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    straight = x.shape[-1] - 2 * half
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = upcast(x[..., straight : straight + half]), upcast(x[..., straight + half :])
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[..., :straight] = x[..., :straight]
    y[..., straight : straight + half] = first * cos - second * sin
    y[..., straight + half :] = second * cos + first * sin
    return y
