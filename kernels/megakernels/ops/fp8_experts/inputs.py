"""Validation of the arguments of the experts' products in eight bits."""

from collections.abc import Sequence

from torch import Tensor

from megakernels._common import require
from megakernels.ops.fp8_linear.facts import BLOCKS, MULTIPLE
from megakernels.ops.fp8_linear.inputs import DTYPES, SCALINGS, check_numbers
from megakernels.ops.moe.inputs import Experts, require_experts


def check_forward(given: Experts, scaling: str, numbers: Sequence[Tensor], *, keeps: bool) -> None:
    """Raise for arguments that `fp8_experts` does not support."""
    x, weights, rows = given.x, given.weights, given.rows
    fits = x.dim() == 2 and weights.dim() == 2 and weights.shape[0] == x.shape[0] and rows.shape == (weights.numel(),)
    require(fits, "fp8_experts", "x must be [N,h], weights [N,k], rows [N·k]", x=x.shape, weights=weights.shape, rows=rows.shape)
    require_experts("fp8_experts", given)
    _check_bank("fp8_experts", given, scaling, numbers)
    require(not keeps or scaling not in BLOCKS, "fp8_experts", "keeps goes with scaling tensor, rows or delayed", scaling=scaling)
    require(x.dtype in DTYPES, "fp8_experts", "x must be fp32 or bf16", dtype=x.dtype)


def check_backward(grad_y: Tensor, given: Experts, scales: Tensor | None, scaling: str, numbers: Sequence[Tensor]) -> None:
    """Raise for arguments that `fp8_experts_backward` does not support."""
    _check_bank("fp8_experts_backward", given, scaling, numbers)
    tokens, hidden, num_experts = given.weights.shape[0], given.up.shape[2], given.up.shape[0]
    if scales is None:
        kept = given.x.shape == (tokens, hidden) and given.x.dtype == given.up.dtype
    else:
        kept = given.x.shape[0] == hidden and scales.shape == (num_experts * hidden,)
    require(
        kept and grad_y.shape == (tokens, hidden) and grad_y.dtype == given.up.dtype,
        "fp8_experts_backward",
        "grad_y must be [N,h], x too, or with its scales [E·h] what fp8_experts kept of it",
        grad_y=grad_y.shape,
        x=given.x.shape,
        N=tokens,
        h=hidden,
    )


def _check_bank(operation: str, given: Experts, scaling: str, numbers: Sequence[Tensor]) -> None:
    check_numbers(operation, scaling, numbers, 2 if given.gate is None else 3)
    _, width, hidden = given.up.shape
    fits = scaling in SCALINGS and width % MULTIPLE == 0 and hidden % MULTIPLE == 0
    require(
        fits, operation, "F and h must be multiples of 16, scaling tensor, rows, delayed or of blocks", F=width, h=hidden, scaling=scaling
    )
