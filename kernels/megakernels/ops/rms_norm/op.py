"""Root-mean-square norm: plain, gated, and fused with an addition. Saved: x (the sum), (gate,) weight, rstd."""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, fake_like, join, only_needed, require, runs_triton
from megakernels._common.device import kernel_module
from megakernels.ops.rms_norm import reference
from megakernels.ops.rms_norm.rows import row_dot, row_gradients, row_scale, row_square_sum
from megakernels.ops.rms_norm.slices import gated_dot, gated_scale, gated_scale_gradients, gated_square_sum

__all__ = [
    "add_rms_norm", "gated_dot", "gated_rms_norm", "gated_scale", "gated_scale_gradients", "gated_square_sum", "rms_norm", "row_dot",
    "row_gradients", "row_scale", "row_square_sum",
]  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Scales each row of x to unit root mean square, then by offset + weight.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        offset: added to the weight in fp32; 1 for weights around zero.

    Returns:
        [..., D], contiguous, in x's dtype.

    Saves:
        rstd: fp32 [...].

    Triton:
        One kernel forward, one backward. Rows wider than 8192 use plain torch.

    Raises:
        ValueError: weight is not [D].

    Source: arXiv:1910.07467, equation 4.
    """
    require(weight.shape == x.shape[-1:], "rms_norm", "weight must be [D] for x [..., D]", x=x.shape, weight=weight.shape)
    y: Tensor = _rms_norm(x, weight, eps, offset)[0]
    return y


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum x + branch, rounded to x's dtype, and its norm: a residual stream with the next block's input, in one pass.

    Args:
        x: [..., D].
        branch: [..., D], in x's dtype.
        weight: [D].
        eps: added to the mean square.

    Returns:
        Sum and norm, [..., D] each, contiguous, in x's dtype. Both terms share one gradient tensor.

    Saves:
        total: [..., D], the sum that is returned.
        rstd: fp32 [...].

    Triton:
        One kernel forward, one backward. Rows wider than 8192 (fp32: 4096) use plain torch.

    Raises:
        ValueError: shapes or dtypes differ, or weight is not [D].

    Source: arXiv:1910.07467, equation 4.
    """
    fits = x.shape == branch.shape and x.dtype == branch.dtype
    require(fits, "add_rms_norm", "x and branch must have one shape and dtype", x=x.shape, branch=branch.shape)
    require(weight.shape == x.shape[-1:], "add_rms_norm", "weight must be [D] for x [..., D]", x=x.shape, weight=weight.shape)
    total, y, _ = _add_rms_norm(x, branch, weight, eps)
    return total, y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """RMS norm of x · silu(gate) over each of num_groups equal slices of the last dim.

    Args:
        x: [..., D].
        gate: [..., D].
        weight: [D].
        eps: added to each slice's mean square.
        num_groups: slices; divides D.

    Returns:
        [..., D], contiguous, in x's dtype.

    Saves:
        rstd: fp32 [..., num_groups].

    Triton:
        One kernel forward, one backward. Slices wider than 8192 (fp32: 4096) use plain torch.

    Raises:
        ValueError: shapes differ, or num_groups does not divide D.

    Source: arXiv:2405.21060, section 7 (the norm of the Mamba-2 block, gate applied first).
    """
    require(x.shape == gate.shape, "gated_rms_norm", "x and gate must have one shape", x=x.shape, gate=gate.shape)
    require(weight.shape == x.shape[-1:], "gated_rms_norm", "weight must be [D] for x [..., D]", x=x.shape, weight=weight.shape)
    fits = num_groups > 0 and x.shape[-1] % num_groups == 0
    require(fits, "gated_rms_norm", "num_groups must divide D", D=x.shape[-1], num_groups=num_groups)
    y: Tensor = _gated_rms_norm(x, gate, weight, eps, num_groups)[0]
    return y


def _kernel(x: Tensor, num_groups: int, *, gated: bool) -> Any:
    """The module of the kernels, or None if they do not support these rows."""
    return kernel if runs_triton(x) and (kernel := kernel_module(reference)).accepts(x, num_groups, gated=gated) else None


@custom_op("megakernels::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    if kernel := _kernel(x, 1, gated=False):
        y, rstd = kernel.forward(x, None, weight, eps, 1, offset)
        return y, rstd.view(x.shape[:-1])
    return reference.rms_norm_forward(x, weight, eps, offset)


@custom_op("megakernels::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, needs: list[bool]) -> list[Tensor]:
    if kernel := _kernel(x, 1, gated=False):
        return only_needed(kernel.backward(grad_y, x, None, weight, rstd, 1, [needs[0], False, needs[1]], offset))
    return only_needed(reference.rms_norm_backward(grad_y, x, weight, rstd, needs, offset=offset))


@_rms_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_like(x), x.new_empty(x.shape[:-1], dtype=accumulator_dtype(x.dtype))


join(_rms_norm, _rms_norm_backward, outputs=("y", "rstd"), gradients=("x", "weight"))


@custom_op("megakernels::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if kernel := _kernel(x, 1, gated=True):
        results: tuple[Tensor, Tensor, Tensor] = kernel.add_forward(x, branch, weight, eps)
        return results
    return reference.add_rms_norm_forward(x, branch, weight, eps)


@custom_op("megakernels::add_rms_norm_backward", mutates_args=())
def _add_rms_norm_backward(
    grad_total: Tensor, grad_y: Tensor, total: Tensor, weight: Tensor, rstd: Tensor, needs: list[bool]
) -> list[Tensor]:
    if kernel := _kernel(total, 1, gated=True):
        return only_needed(kernel.add_backward(grad_total, grad_y, total, weight, rstd, needs))
    return only_needed(reference.add_rms_norm_backward(grad_total, grad_y, total, weight, rstd, needs))


@_add_rms_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_like(x), fake_like(x), x.new_empty(x.shape[:-1], dtype=accumulator_dtype(x.dtype))


@_add_rms_norm_backward.register_fake
def _(_grad_total: Tensor, _grad_y: Tensor, total: Tensor, weight: Tensor, _rstd: Tensor, needs: list[bool]) -> list[Tensor]:
    return [fake_like(tensor) for tensor, need in zip((total, weight), needs, strict=True) if need]


join(_add_rms_norm, _add_rms_norm_backward, outputs=("total", "y", "rstd"), gradients=("x", "weight"), same_gradient={"branch": "x"})


@custom_op("megakernels::gated_rms_norm", mutates_args=())
def _gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> tuple[Tensor, Tensor]:
    if kernel := _kernel(x, num_groups, gated=True):
        results: tuple[Tensor, Tensor] = kernel.forward(x, gate, weight, eps, num_groups)
        return results
    return reference.gated_rms_norm_forward(x, gate, weight, eps, num_groups)


@custom_op("megakernels::gated_rms_norm_backward", mutates_args=())
def _gated_rms_norm_backward(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, num_groups: int, needs: list[bool]
) -> list[Tensor]:
    if kernel := _kernel(x, num_groups, gated=True):
        return only_needed(kernel.backward(grad_y, x, gate, weight, rstd, num_groups, needs))
    return only_needed(reference.gated_rms_norm_backward(grad_y, x, gate, weight, rstd, num_groups, needs))


@_gated_rms_norm.register_fake
def _(x: Tensor, _gate: Tensor, _weight: Tensor, _eps: float, num_groups: int) -> tuple[Tensor, Tensor]:
    return fake_like(x), x.new_empty((*x.shape[:-1], num_groups), dtype=accumulator_dtype(x.dtype))


join(_gated_rms_norm, _gated_rms_norm_backward, outputs=("y", "rstd"), gradients=("x", "gate", "weight"))
