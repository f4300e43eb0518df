"""Tokens through their experts and back, in one operation that keeps the tokens and no copy of them for each expert.

Two registrations, with and without a gate, so that each saves exactly what it has.
"""

from typing import Any

from torch import Tensor
from torch.library import custom_op

from megakernels._common import chooses_triton, fake_like, join, only_needed, require, runs_triton, state_scratch
from megakernels.ops.moe import reference
from megakernels.ops.moe.grouped_mlp import GATED, require_experts
from megakernels.ops.moe.sizes import backward_scratch_bytes, forward_scratch_bytes


def routed_experts(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """`combine(experts(dispatch(x, rows, k), weights, rows, counts, ...), rows, k)`, without the rows in between.

    Args:
        x: [N, h].
        weights: fp32 [N, k].
        rows: int32 [N·k], the pairs token·k + slot sorted by expert: a permutation.
        counts: int32 [E], rows of each expert; they sum to N·k.
        gate: [E, F, h] for swiglu, else None.
        up: [E, F, h].
        down: [E, h, F].
        activation: swiglu, relu2 or gelu.

    Returns:
        [N, h], contiguous, in x's dtype: each token's experts, weighted and summed. An expert with no rows gets zero gradients.

    Raises:
        ValueError: shapes, dtypes or activation do not fit.

    Source: arXiv:2403.08245 (gathered and scattered expert products); arXiv:2211.15841 (dropless experts).
    """
    fits = x.dim() == 2 and weights.dim() == 2 and weights.shape[0] == x.shape[0] and rows.shape == (weights.numel(),)
    require(fits, "routed_experts", "x must be [N,h], weights [N,k], rows [N·k]", x=x.shape, weights=weights.shape, rows=rows.shape)
    require_experts("routed_experts", x, counts, gate, up, down, activation)
    y: Tensor
    if gate is None:
        y = _routed_experts(x, weights, rows, counts, up, down, activation)[0]
    else:
        y = _routed_experts_gated(x, weights, rows, counts, gate, up, down)[0]
    return y


def _forward(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    if runs_triton(x):
        from megakernels.ops.moe import kernel  # noqa: PLC0415  triton is optional, and only CUDA needs it

        return kernel.forward(x, weights, rows, counts, gate, up, down, activation)
    return reference.routed_experts_forward(x, weights, rows, counts, gate, up, down, activation)


def _backward(*arguments: Any) -> list[Tensor]:
    grad_y = arguments[0]
    if runs_triton(grad_y):
        from megakernels.ops.moe import kernel  # noqa: PLC0415

        return only_needed(kernel.backward(*arguments))
    return only_needed(reference.routed_experts_backward(*arguments))


@custom_op("megakernels::routed_experts", mutates_args=())
def _routed_experts(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    y, _, up_out = _forward(x, weights, rows, counts, None, up, down, activation)
    return y, up_out


@custom_op("megakernels::routed_experts_backward", mutates_args=())
def _routed_experts_backward(
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
    return _backward(grad_y, x, weights, rows, counts, None, up, down, None, up_out, activation, wanted)


@_routed_experts.register_fake
def _(x: Tensor, _weights: Tensor, rows: Tensor, _counts: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return fake_like(x), x.new_empty((rows.shape[0], up.shape[1]))


join(_routed_experts, _routed_experts_backward, outputs=("y", "up_out"), gradients=("x", "weights", "up", "down"))


@custom_op("megakernels::routed_experts_gated", mutates_args=())
def _routed_experts_gated(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    y, gate_out, up_out = _forward(x, weights, rows, counts, gate, up, down, GATED)
    assert gate_out is not None
    return y, gate_out, up_out


@custom_op("megakernels::routed_experts_gated_backward", mutates_args=())
def _routed_experts_gated_backward(
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
    return _backward(grad_y, x, weights, rows, counts, gate, up, down, gate_out, up_out, GATED, needs)


@_routed_experts_gated.register_fake
def _(x: Tensor, _weights: Tensor, rows: Tensor, _counts: Tensor, _gate: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    outer = (rows.shape[0], up.shape[1])
    return fake_like(x), x.new_empty(outer), x.new_empty(outer)


join(
    _routed_experts_gated,
    _routed_experts_gated_backward,
    outputs=("y", "gate_out", "up_out"),
    gradients=("x", "weights", "gate", "up", "down"),
)


def _of_forward(x: Tensor, weights: Tensor, rows: Tensor, _counts: Tensor, up: Tensor, *_: Any) -> int:
    return forward_scratch_bytes(x, weights, rows, up) if chooses_triton(x) else 0


def _of_gated_forward(x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, _gate: Tensor, up: Tensor, *_: Any) -> int:
    return _of_forward(x, weights, rows, counts, up)


def _of_backward(_grad_y: Tensor, x: Tensor, weights: Tensor, rows: Tensor, _counts: Tensor, up: Tensor, *others: Any) -> int:
    needs = others[-1]
    wanted = *needs[:2], False, *needs[2:]
    return backward_scratch_bytes(x, weights, rows, up, wanted, gated=False) if chooses_triton(x) else 0


def _of_gated_backward(
    _grad_y: Tensor, x: Tensor, weights: Tensor, rows: Tensor, _counts: Tensor, _gate: Tensor, up: Tensor, *others: Any
) -> int:
    return backward_scratch_bytes(x, weights, rows, up, others[-1], gated=True) if chooses_triton(x) else 0


state_scratch(_routed_experts, _of_forward)
state_scratch(_routed_experts_gated, _of_gated_forward)
state_scratch(_routed_experts_backward, _of_backward)
state_scratch(_routed_experts_gated_backward, _of_gated_backward)
