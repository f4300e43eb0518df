"""The experts' MLPs over rows sorted by expert. Two registrations, with and without a gate, so that each saves exactly what it has."""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import fake_like, join, only_needed, require
from megakernels.ops.moe import reference

GATED = "swiglu"
UNGATED = ("relu2", "gelu")


def experts(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """The MLP of each row's expert, times the row's routing weight.

    Row i of expert e, with w = weights.flatten()[rows[i]], is w · act(x_i upₑᵀ) downₑᵀ; for swiglu, w · (silu(x_i gateₑᵀ) ⊙ (x_i upₑᵀ))
    downₑᵀ.

    Args:
        x: [M, h], the rows of expert 0, then of expert 1, ...
        weights: fp32 [N, k].
        rows: int32 [M], distinct indices into weights.flatten().
        counts: int32 [E], rows of each expert; they sum to M.
        gate: [E, F, h] for swiglu, else None.
        up: [E, F, h].
        down: [E, h, F].
        activation: swiglu, relu2 or gelu.

    Returns:
        [M, h], contiguous, in x's dtype. An expert with no rows gets zero gradients.

    Raises:
        ValueError: shapes, dtypes or activation do not fit.

    Source: arXiv:2211.15841 (dropless experts).
    """
    fits = x.dim() == 2 and rows.shape == x.shape[:1]
    require(fits, "experts", "x must be [M,h], rows [M]", x=x.shape, rows=rows.shape)
    require_experts("experts", x, counts, gate, up, down, activation)
    y: Tensor
    if gate is None:
        y = _experts(x, weights, rows, counts, up, down, activation)[0]
    else:
        y = _experts_gated(x, weights, rows, counts, gate, up, down)[0]
    return y


def require_experts(operation: str, x: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str) -> None:
    """Refuses an expert bank that does not fit together or to x [..., h].

    Raises:
        ValueError: shapes, dtypes or activation do not fit.
    """
    gate_shape = None if gate is None else gate.shape
    known = activation == GATED if gate is not None else activation in UNGATED
    require(known, operation, "swiglu takes a gate, relu2 and gelu take none", activation=activation, gate=gate_shape)
    num_experts, width, hidden = up.shape
    fits = x.shape[-1] == hidden and counts.shape == (num_experts,)
    require(fits, operation, "x must be [...,h], counts [E], up [E,F,h]", x=x.shape, counts=counts.shape, up=up.shape)
    fits = down.shape == (num_experts, hidden, width) and (gate is None or gate.shape == up.shape)
    require(fits, operation, "down must be [E,h,F], gate as up", up=up.shape, down=down.shape, gate=gate_shape)
    same = x.dtype == up.dtype == down.dtype and (gate is None or gate.dtype == x.dtype)
    require(same, operation, "x and the matrices must have one dtype", x=x.dtype, up=up.dtype, down=down.dtype)


@custom_op("megakernels::experts", mutates_args=())
def _experts(x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    y, _, up_out = reference.experts_forward(x, weights, rows, counts, None, up, down, activation)
    return y, up_out


@custom_op("megakernels::experts_backward", mutates_args=())
def _experts_backward(
    grad_y: Tensor,
    x: Tensor,
    weights: Tensor,
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_out: Tensor,
    activation: str,
    needs: list[bool],
) -> list[Tensor]:
    wanted = (*needs[:2], False, *needs[2:])
    return only_needed(reference.experts_backward(grad_y, x, weights, rows, counts, None, up, down, None, up_out, activation, wanted))


@_experts.register_fake
def _(x: Tensor, _weights: Tensor, _rows: Tensor, _counts: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_like(x), x.new_empty((x.shape[0], up.shape[1]))


join(_experts, _experts_backward, outputs=("y", "up_out"), gradients=("x", "weights", "up", "down"))


@custom_op("megakernels::experts_gated", mutates_args=())
def _experts_gated(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    y, gate_out, up_out = reference.experts_forward(x, weights, rows, counts, gate, up, down, GATED)
    assert gate_out is not None
    return y, gate_out, up_out


@custom_op("megakernels::experts_gated_backward", mutates_args=())
def _experts_gated_backward(
    grad_y: Tensor,
    x: Tensor,
    weights: Tensor,
    rows: Tensor,
    counts: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_out: Tensor,
    up_out: Tensor,
    needs: list[bool],
) -> list[Tensor]:
    return only_needed(reference.experts_backward(grad_y, x, weights, rows, counts, gate, up, down, gate_out, up_out, GATED, needs))


@_experts_gated.register_fake
def _(x: Tensor, _weights: Tensor, _rows: Tensor, _counts: Tensor, _gate: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    outer = (x.shape[0], up.shape[1])
    return fake_like(x), x.new_empty(outer), x.new_empty(outer)


join(_experts_gated, _experts_gated_backward, outputs=("y", "gate_out", "up_out"), gradients=("x", "weights", "gate", "up", "down"))
