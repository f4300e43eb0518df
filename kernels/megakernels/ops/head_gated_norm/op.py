"""RMSNorm of each head times its activated gate. Saved: x, gate, weight and one statistic per head."""

from types import ModuleType
from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, fake_like, join, only_needed, require, runs_triton
from megakernels._common.device import kernel_module
from megakernels.ops.head_gated_norm import reference

__all__ = ["head_gated_norm"]


def head_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, sigmoid: bool = False) -> Tensor:
    """RMS norm of x over the last dim, times silu(gate), or sigmoid(gate).

    Args:
        x: [..., V].
        gate: [..., V].
        weight: [V], shared by all heads.
        eps: added to each mean square.
        sigmoid: True if the gate is a sigmoid instead of a silu.

    Returns:
        [..., V], contiguous, in x's dtype.

    Saves:
        rstd: fp32 [...].

    Triton:
        One kernel forward, one backward. Heads wider than 1024 use plain torch.

    Raises:
        ValueError: shapes differ, or weight is not [V].

    Source: arXiv:2412.06464, section 3.4 (silu); arXiv:2510.26692, section 4 (sigmoid).
    """
    require(x.shape == gate.shape, "head_gated_norm", "x and gate must have one shape", x=x.shape, gate=gate.shape)
    require(weight.shape == x.shape[-1:], "head_gated_norm", "weight must be [V] for x [..., V]", x=x.shape, weight=weight.shape)
    y: Tensor = _head_gated_norm(x, gate, weight, eps, sigmoid)[0]
    return y


def _module(x: Tensor) -> ModuleType:
    """The kernels if they support these rows, else plain torch."""
    return kernel if runs_triton(x) and (kernel := kernel_module(reference)).accepts(x) else reference


@custom_op("megakernels::head_gated_norm", mutates_args=())
def _head_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool) -> tuple[Tensor, Tensor]:
    y, rstd = _module(x).forward(x, gate, weight, eps, sigmoid)
    return y.contiguous(), rstd


@custom_op("megakernels::head_gated_norm_backward", mutates_args=())
def _head_gated_norm_backward(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, sigmoid: bool, needs: list[bool]
) -> list[Tensor]:
    return only_needed(_module(x).backward(grad_y, x, gate, weight, rstd, sigmoid, needs))


@_head_gated_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_like(x), x.new_empty(x.shape[:-1], dtype=accumulator_dtype(x.dtype))


join(_head_gated_norm, _head_gated_norm_backward, outputs=("y", "rstd"), gradients=("x", "gate", "weight"))
