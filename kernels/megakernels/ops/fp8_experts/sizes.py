"""Bytes that the experts' MLPs in eight bits hold inside themselves on CUDA, for given tensors, by the facts of their sizes.

Plain torch's own intermediates between products are not counted, as those of `experts` are not.
"""

from typing import Any

from torch import Tensor

from megakernels._common import chooses_triton
from megakernels.ops.fp8_experts.facts import ScaledBank
from megakernels.ops.moe.facts import ExpertSizes


def _bank(tokens: int, slots: int, up: Tensor, scaling: str, *, gated: bool, keeps: bool) -> ScaledBank:
    experts, width, hidden = up.shape
    sizes = ExpertSizes(tokens, slots, experts, width, hidden, gated, False, up.itemsize)
    return ScaledBank(sizes, scaling == "rows", chooses_triton(up), keeps)


def forward_scratch(
    x: Tensor,
    weights: Tensor,
    _rows: Tensor,
    _counts: Tensor,
    gate: Tensor | None,
    up: Tensor,
    _down: Tensor,
    _activation: str,
    scaling: str,
    keeps: bool,
    *_others: Any,
) -> int:
    """Bytes inside `fp8_experts`."""
    return _bank(x.shape[0], weights.shape[1], up, scaling, gated=gate is not None, keeps=keeps).forward_bytes()


def backward_scratch(
    _grad_y: Tensor,
    _x: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    _rows: Tensor,
    _counts: Tensor,
    _gate_out: Tensor | None,
    _up_out: Tensor,
    gate: Tensor | None,
    up: Tensor,
    _down: Tensor,
    _activation: str,
    scaling: str,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *_others: Any,
) -> int:
    """Bytes inside `fp8_experts_backward`."""
    tokens, slots = weights.shape
    bank = _bank(tokens, slots, up, scaling, gated=gate is not None, keeps=scales is not None)
    of_gate, of_up, of_down = (0 if bias is None else bias.nbytes for bias in (gate_bias, up_bias, down_bias))
    return bank.backward_bytes((of_gate, of_up, of_down))
