"""The experts' MLPs over rows sorted by expert."""

from torch import Tensor

from megakernels._common import require
from megakernels.ops.moe import reference
from megakernels.ops.moe.inputs import Experts, experts_operation, require_experts


def experts(
    x: Tensor, weights: Tensor, rows: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor,
    activation: str,
    *, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:  # fmt: skip
    """The MLP of each row's expert, times the row's routing weight.

    Row i of expert e, with w = weights.flatten()[rows[i]], is w · act(x_i upₑᵀ) downₑᵀ; for swiglu, w · (silu(x_i gateₑᵀ) ⊙ (x_i upₑᵀ))
    downₑᵀ, for geglu the same with gelu. A product's bias is added to it. With a limit l and g = min(x_i gateₑᵀ, l), u = x_i upₑᵀ within ±
    l, swiglu is g · σ(1.702 g) ⊙ (u + 1).

    Args:
        x: [M, h], the rows of expert 0, then of expert 1, ...
        weights: fp32 [N, k].
        rows: int32 [M], distinct indices into weights.flatten().
        counts: int32 [E], rows of each expert; they sum to M.
        gate: [E, F, h] for swiglu and geglu, else None.
        up: [E, F, h].
        down: [E, h, F].
        activation: swiglu, geglu, relu2 or gelu.
        gate_bias: [E, F] or None, as the next two.
        up_bias: [E, F].
        down_bias: [E, h].
        limit: limit of the clamped swiglu, or None.

    Returns:
        [M, h], contiguous, in x's dtype. An expert with no rows gets zero gradients.

    Saves:
        gate_out: [M, F] in x's dtype, with a gate only; with its bias, as the next.
        up_out: [M, F] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or activation do not fit.

    Source: arXiv:2211.15841 (dropless experts); arXiv:2508.10925, section 2.1 (clamped swiglu).
    """
    fits = x.dim() == 2 and rows.shape == x.shape[:1]
    require(fits, "experts", "x must be [M,h], rows [M]", x=x.shape, rows=rows.shape)
    given = Experts(x, weights, rows, counts, gate, up, down, gate_bias, up_bias, down_bias, activation, limit)
    require_experts("experts", given)
    return _run(given)


_run = experts_operation("experts", reference.experts_forward, reference.experts_backward)
