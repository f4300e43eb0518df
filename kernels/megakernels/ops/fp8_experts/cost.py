"""Cost of the kernels of experts in eight bits that launches do not show: rows are read for each slot, and twice for scales of columns."""

from typing import Any

from torch import Tensor

from megakernels._common import Cost


def forward_cost(
    x: Tensor,
    _weights: Tensor,
    rows: Tensor,
    _counts: Tensor,
    _gate: Tensor | None,
    _up: Tensor,
    _down: Tensor,
    _activation: str,
    scaling: str,
    keeps: bool,
    *_others: Any,
) -> Cost:
    """Of `fp8_experts`."""
    return Cost({}, again_bytes=_tokens_again(x, rows, scaling) if keeps else 0)


def backward_cost(
    grad_y: Tensor,
    _x: Tensor,
    scales: Tensor | None,
    _weights: Tensor,
    rows: Tensor,
    _counts: Tensor,
    _gate_out: Tensor | None,
    up_out: Tensor,
    gate: Tensor | None,
    up: Tensor,
    _down: Tensor,
    _activation: str,
    scaling: str,
    *_others: Any,
) -> Cost:
    """Of `fp8_experts_backward`."""
    first = 1 if gate is None else 2
    tokens = _tokens_again(grad_y, rows, scaling) * (1 if scales is not None else 2)
    return Cost({}, again_bytes=tokens + ((1 + first) * (up_out.nbytes + up.nbytes) if scaling == "rows" else 0))


def _tokens_again(x: Tensor, rows: Tensor, scaling: str) -> int:
    """Of a transposed copy of tokens' rows."""
    passes = 2 if scaling == "rows" else 1
    return (passes * rows.shape[0] - x.shape[0]) * x.shape[1] * x.itemsize
