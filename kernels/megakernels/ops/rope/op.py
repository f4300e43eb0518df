"""Rotary position embedding, alone and inside multi-head latent attention's keys. Saved: cos, sin."""

from types import ModuleType
from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, join, only_needed, require
from megakernels._common.device import module_for
from megakernels.ops.rope import reference

__all__ = ["mla_kv", "mla_kv_backward", "rope"]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last R dims of every head, half-split convention.

    Args:
        x: [B, T, H, D].
        cos: fp32 [T, R/2] with R ≤ D; no gradient.
        sin: fp32 [T, R/2]; no gradient.

    Returns:
        [B, T, H, D], contiguous, in x's dtype.

    Triton:
        One kernel for both directions. Heads without a rotary dim use plain torch.

    Raises:
        ValueError: shapes do not fit.

    Source: arXiv:2104.09864, equation 34.
    """
    _check("rope", x.shape[1], x.shape[-1], cos, sin)
    y: Tensor = _rope(x, cos, sin)
    return y


def mla_kv(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of multi-head latent attention: k = [kv's first n dims, rotated k_rope for every head], v = the rest of kv.

    Args:
        kv: [B, T, H, n+v].
        k_rope: [B, T, R], one rotary key for all heads, in kv's dtype.
        cos: fp32 [T, R/2]; no gradient.
        sin: fp32 [T, R/2]; no gradient.
        nope_dim: n.

    Returns:
        k [B, T, H, n+R] and v [B, T, H, v], both contiguous.

    Triton:
        One kernel forward, two backward. Heads without a rotary dim use plain torch.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: arXiv:2405.04434, equations 14-16.
    """
    _check("mla_kv", kv.shape[1], k_rope.shape[-1], cos, sin)
    fits = k_rope.shape[:2] == kv.shape[:2] and k_rope.shape[-1] == 2 * cos.shape[-1] and 0 <= nope_dim <= kv.shape[-1]
    require(fits, "mla_kv", "k_rope must be [B,T,R], n at most kv's width", kv=kv.shape, k_rope=k_rope.shape, cos=cos.shape, n=nope_dim)
    require(kv.dtype == k_rope.dtype, "mla_kv", "kv and k_rope must have one dtype", kv=kv.dtype, k_rope=k_rope.dtype)
    made: tuple[Tensor, Tensor] = _mla_kv(kv, k_rope, cos, sin, nope_dim)
    return made


def mla_kv_backward(grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of kv [B, T, H, n+v] and k_rope [B, T, R], for a caller that makes keys and values again; arguments are those of `mla_kv`.

    Args:
        grad_k: [B, T, H, n+R].
        grad_v: [B, T, H, v].
        cos: fp32 [T, R/2].
        sin: fp32 [T, R/2].
        nope_dim: n.
    """
    grad_kv, grad_rope = _mla_kv_backward(grad_k, grad_v, cos, sin, nope_dim, [True, True])
    return grad_kv, grad_rope


def _check(operation: str, num_positions: int, width: int, cos: Tensor, sin: Tensor) -> None:
    fits = cos.shape == sin.shape and cos.dim() == 2 and cos.shape[0] == num_positions and 2 * cos.shape[1] <= width
    require(
        fits, operation, "cos and sin must be [T, R/2] with R at most the width", T=num_positions, width=width, cos=cos.shape, sin=sin.shape
    )


def _module(x: Tensor, cos: Tensor) -> ModuleType:
    """The kernels, unless nothing is rotated, or plain torch."""
    return module_for(x, reference) if cos.numel() else reference


@custom_op("megakernels::rope", mutates_args=())
def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result: Tensor = _module(x, cos).rotate(x, cos, sin, back=False)
    return result


@custom_op("megakernels::rope_backward", mutates_args=())
def _rope_backward(grad_y: Tensor, cos: Tensor, sin: Tensor, needs: list[bool]) -> list[Tensor]:
    if not needs[0]:
        return []
    return [_module(grad_y, cos).rotate(grad_y, cos, sin, back=True)]


@_rope.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return fake_like(x)


@_rope_backward.register_fake
def _(grad_y: Tensor, _cos: Tensor, _sin: Tensor, needs: list[bool]) -> list[Tensor]:
    return [fake_like(grad_y)] if needs[0] else []


join(_rope, _rope_backward, outputs=("y",), gradients=("x",))


@custom_op("megakernels::mla_kv", mutates_args=())
def _mla_kv(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _module(kv, cos).mla_kv_forward(kv, k_rope, cos, sin, nope_dim)
    return result


@custom_op("megakernels::mla_kv_backward", mutates_args=())
def _mla_kv_backward(grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor, nope_dim: int, needs: list[bool]) -> list[Tensor]:
    return only_needed(_module(grad_k, cos).mla_kv_backward(grad_k, grad_v, cos, sin, nope_dim, needs))


@_mla_kv.register_fake
def _(kv: Tensor, k_rope: Tensor, _cos: Tensor, _sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    heads = kv.shape[:-1]
    return kv.new_empty((*heads, nope_dim + k_rope.shape[-1])), kv.new_empty((*heads, kv.shape[-1] - nope_dim))


@_mla_kv_backward.register_fake
def _(grad_k: Tensor, grad_v: Tensor, _cos: Tensor, _sin: Tensor, nope_dim: int, needs: list[bool]) -> list[Tensor]:
    batch, positions, heads, width = grad_k.shape
    grad_kv = grad_k.new_empty((batch, positions, heads, nope_dim + grad_v.shape[-1])) if needs[0] else None
    return only_needed((grad_kv, grad_k.new_empty((batch, positions, width - nope_dim)) if needs[1] else None))


join(_mla_kv, _mla_kv_backward, outputs=("k", "v"), gradients=("kv", "k_rope"))
