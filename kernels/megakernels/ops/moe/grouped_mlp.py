"""The experts' MLPs over rows sorted by expert."""

from torch import Tensor

from megakernels._common import require
from megakernels.ops.moe import reference
from megakernels.ops.moe.inputs import Experts, experts_operation, require_experts


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

    Saves:
        gate_out: [M, F] in x's dtype, with a gate only.
        up_out: [M, F] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or activation do not fit.

    Source: arXiv:2211.15841 (dropless experts).
    """
    fits = x.dim() == 2 and rows.shape == x.shape[:1]
    require(fits, "experts", "x must be [M,h], rows [M]", x=x.shape, rows=rows.shape)
    given = Experts(x, weights, rows, counts, gate, up, down, activation)
    require_experts("experts", given)
    return _run(given)


_run = experts_operation("experts", reference.experts_forward, reference.experts_backward)
