"""The gated norm of sharded rows: sums over a slice, and the slice's result given the sums over the full row.

With u = x · silu(gate) over a full row of D elements: r = (Σ u² / D + ε)^(−1/2), y = u · r ⊙ w, and with g = ∂L/∂y ⊙ w the gradient of u
is r · (g − u · r · (Σ g ⊙ u · r) / D). Both sums run over all slices. The caller adds them; these functions do not communicate.
"""

from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, only_needed, require
from megakernels.ops.rms_norm import reference
from megakernels.ops.rms_norm.rows import made_per_row


def gated_square_sum(x: Tensor, gate: Tensor) -> Tensor:
    """Σ (x · silu(gate))² over the last dim.

    Args:
        x: [..., D / n].
        gate: [..., D / n].

    Returns:
        fp32 [..., 1] (fp64 for fp64 x).

    Raises:
        ValueError: shapes differ.
    """
    require(x.shape == gate.shape, "gated_square_sum", "x and gate must have one shape", x=x.shape, gate=gate.shape)
    found: Tensor = _gated_square_sum(x, gate)
    return found


def gated_scale(x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The product x · silu(gate) · rstd · weight, with the rstd of full rows.

    Args:
        x: [..., D / n].
        gate: [..., D / n].
        weight: [D / n].
        rstd: [..., 1].

    Returns:
        [..., D / n], contiguous, in x's dtype.

    Raises:
        ValueError: weight is not [D / n].
    """
    require(weight.shape == x.shape[-1:], "gated_scale", "weight must be [D/n] for x [..., D/n]", x=x.shape, weight=weight.shape)
    found: Tensor = _gated_scale(x, gate, weight, rstd)
    return found


def gated_dot(grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Σ grad_y · weight · x · silu(gate) · rstd over the last dim: fp32 [..., 1]."""
    found: Tensor = _gated_dot(grad_y, x, gate, weight, rstd)
    return found


def gated_scale_gradients(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, mean_dot: Tensor, needs: list[bool]
) -> list[Tensor]:
    """The required gradients of x, gate and weight.

    Args:
        grad_y: [..., D / n].
        x: [..., D / n].
        gate: [..., D / n].
        weight: [D / n].
        rstd: rstd of full rows, [..., 1].
        mean_dot: `gated_dot` summed over all slices and divided by D, [..., 1].
        needs: True if the gradient is required, for each of x, gate and weight.
    """
    found: list[Tensor] = _gated_scale_gradients(grad_y, x, gate, weight, rstd, mean_dot, needs)
    return found


_gated_square_sum = custom_op("megakernels::gated_square_sum", reference.gated_square_sum, mutates_args=())
_gated_scale = custom_op("megakernels::gated_scale", reference.gated_scale, mutates_args=())
_gated_dot = custom_op("megakernels::gated_dot", reference.gated_dot, mutates_args=())


@custom_op("megakernels::gated_scale_gradients", mutates_args=())
def _gated_scale_gradients(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, mean_dot: Tensor, needs: list[bool]
) -> list[Tensor]:
    return only_needed(reference.gated_rms_norm_backward(grad_y, x, gate, weight, rstd, 1, needs, mean_dot))


_gated_square_sum.register_fake(made_per_row)
_gated_scale.register_fake(lambda x, *_: fake_like(x))
_gated_dot.register_fake(lambda _grad_y, x, *_: made_per_row(x))
_gated_scale_gradients.register_fake(
    lambda _grad_y, *given: [fake_like(each) for each, need in zip(given, given[-1], strict=False) if need]
)
