"""Dispatch, experts and combine in one operation, which saves the tokens and no dispatched copy of them."""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import chooses_triton, require
from megakernels._common.device import module_for
from megakernels.ops.moe import reference
from megakernels.ops.moe.inputs import Experts, Made, experts_operation, require_experts
from megakernels.ops.moe.sizes import backward_cost, backward_scratch_bytes, forward_cost, forward_scratch_bytes


def routed_experts(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor,
    activation: str,
    *, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:  # fmt: skip
    """`combine(experts(dispatch(x, rows, k), weights, rows, counts, ...), rows, k)`, without intermediate rows.

    Args:
        x: [N, h].
        weights: fp32 [N, k].
        rows: int32 [N·k], the pairs token·k + slot sorted by expert: a permutation.
        counts: int32 [E], rows of each expert; they sum to N·k.
        gate: [E, F, h] for swiglu and geglu, else None.
        up: [E, F, h].
        down: [E, h, F].
        activation: swiglu, geglu, relu2 or gelu.
        gate_bias: [E, F] or None, as the next two.
        up_bias: [E, F].
        down_bias: [E, h].
        limit: limit of the clamped swiglu, or None.

    Returns:
        [N, h], contiguous, in x's dtype: each token's experts, weighted and summed. An expert with no rows gets zero gradients.

    Saves:
        gate_out: [N·k, F] in x's dtype, with a gate only; with its bias, as the next.
        up_out: [N·k, F] in x's dtype.

    Scratch:
        Forward: the activated rows [N·k, F] and, with several slots per token, their products [N·k, h] until they are summed. Backward: the
        gradients of the first products' outputs and the activated rows, [N·k, F] each, the rows' gradients [N·k, h] until they are summed,
        and for the matrices' gradients a copy of the rows [N·k, h] of first y's gradient and then x.

    Triton:
        Three kernels forward: up with its activation, down, sum of slots; nine backward: down, gradient of x, sum of slots, two copies of
        rows and their places, the matrices; and one for the gradient of each bias.

    Raises:
        ValueError: shapes, dtypes or activation do not fit.

    Source: arXiv:2403.08245 (gathered and scattered expert products); arXiv:2211.15841 (dropless experts); arXiv:2508.10925, section 2.1
    (clamped swiglu).
    """
    fits = x.dim() == 2 and weights.dim() == 2 and weights.shape[0] == x.shape[0] and rows.shape == (weights.numel(),)
    require(fits, "routed_experts", "x must be [N,h], weights [N,k], rows [N·k]", x=x.shape, weights=weights.shape, rows=rows.shape)
    given = Experts(x, weights, rows, counts, gate, up, down, gate_bias, up_bias, down_bias, activation, limit)
    require_experts("routed_experts", given)
    return _run(given)


def _forward(given: Experts) -> Made:
    made: Made = module_for(given.x, reference).routed_experts_forward(given)
    return made


def _backward(grad_y: Tensor, given: Experts, gate_out: Tensor | None, up_out: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    found: tuple[Tensor | None, ...] = module_for(grad_y, reference).routed_experts_backward(grad_y, given, gate_out, up_out, needs)
    return found


def _forward_scratch(given: Experts) -> int:
    return forward_scratch_bytes(given) if chooses_triton(given.x) else 0


def _backward_scratch(given: Experts, needs: Sequence[bool]) -> int:
    return backward_scratch_bytes(given, needs) if chooses_triton(given.x) else 0


_run = experts_operation("routed_experts", _forward, _backward, _forward_scratch, _backward_scratch, forward_cost, backward_cost)
