"""The norm of sharded rows without a gate: sums over a slice, and the slice's result given the sums over the full row.

r = (Σ x² / D + ε)^(−1/2) over the full row of D elements, y = x · r ⊙ w, and with g = ∂L/∂y ⊙ w the gradient of x is
r · (g − x · r · (Σ g ⊙ x · r) / D). Both sums run over all slices. The caller adds them; these functions do not communicate.
"""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import accumulator_dtype, fake_like, only_needed, require
from megakernels.ops.rms_norm import reference


def row_square_sum(x: Tensor) -> Tensor:
    """Σ x² over the last dim: [..., D / n] -> fp32 [..., 1] (fp64 for fp64 x)."""
    found: Tensor = _row_square_sum(x)
    return found


def row_scale(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The product x · rstd · weight, with the rstd of full rows.

    Args:
        x: [..., D / n].
        weight: [D / n].
        rstd: [..., 1].

    Returns:
        [..., D / n], contiguous, in x's dtype.

    Raises:
        ValueError: weight is not [D / n].
    """
    require(weight.shape == x.shape[-1:], "row_scale", "weight must be [D/n] for x [..., D/n]", x=x.shape, weight=weight.shape)
    found: Tensor = _row_scale(x, weight, rstd)
    return found


def row_dot(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Σ grad_y · weight · x · rstd over the last dim: fp32 [..., 1]."""
    found: Tensor = _row_dot(grad_y, x, weight, rstd)
    return found


def row_gradients(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean_dot: Tensor, needs: list[bool]) -> list[Tensor]:
    """The required gradients of x and weight.

    Args:
        grad_y: [..., D / n].
        x: [..., D / n].
        weight: [D / n].
        rstd: rstd of full rows, [..., 1].
        mean_dot: `row_dot` summed over all slices and divided by D, [..., 1].
        needs: True if the gradient is required, for each of x and weight.
    """
    found: list[Tensor] = _row_gradients(grad_y, x, weight, rstd, mean_dot, needs)
    return found


_row_square_sum = custom_op("megakernels::row_square_sum", reference.row_square_sum, mutates_args=())
_row_scale = custom_op("megakernels::row_scale", reference.row_scale, mutates_args=())
_row_dot = custom_op("megakernels::row_dot", reference.row_dot, mutates_args=())


@custom_op("megakernels::row_gradients", mutates_args=())
def _row_gradients(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean_dot: Tensor, needs: list[bool]) -> list[Tensor]:
    return only_needed(reference.rms_norm_backward(grad_y, x, weight, rstd.squeeze(-1), needs, mean_dot))


def made_per_row(x: Tensor, *_: Any) -> Tensor:
    """One value per row of x, uninitialised."""
    return x.new_empty((*x.shape[:-1], 1), dtype=accumulator_dtype(x.dtype))


_row_square_sum.register_fake(made_per_row)
_row_scale.register_fake(lambda x, *_: fake_like(x))
_row_dot.register_fake(lambda _grad_y, x, *_: made_per_row(x))
_row_gradients.register_fake(
    lambda _grad_y, x, weight, _rstd, _mean_dot, needs: [fake_like(each) for each, need in zip((x, weight), needs, strict=True) if need]
)
