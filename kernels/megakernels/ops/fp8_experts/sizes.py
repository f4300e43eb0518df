"""Bytes that the MLPs of experts in eight bits hold inside themselves on CUDA, by the facts of their sizes, and their cost.

Plain torch's own intermediates between products are not counted, as those of `experts` are not. The cost is what launches do not show:
rows are read for each slot, and twice for scales of columns.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megakernels._common import Cost, chooses_triton
from megakernels.ops.fp8_experts.facts import ScaledBank
from megakernels.ops.fp8_linear.facts import BLOCKS, DELAYED
from megakernels.ops.moe.facts import ExpertSizes


def _bank(tokens: int, slots: int, values: Mapping[str, Any], *, gated: bool, keeps: bool) -> ScaledBank:
    up, scaling, rows = values["up"], values["scaling"], values["packed"] or (None, None, None)
    packed = rows[1] is not None, rows[2] is not None
    experts, width, hidden = up.shape
    sizes = ExpertSizes(tokens, slots, experts, width, hidden, gated, False, up.itemsize)
    return ScaledBank(sizes, scaling == "rows", chooses_triton(up), keeps, scaling in BLOCKS, packed, scaling == DELAYED)


def forward_scratch(values: Mapping[str, Any]) -> int:
    """Bytes inside `fp8_experts`, from its arguments by name."""
    x, weights, gated = values["x"], values["weights"], values["gate"] is not None
    return _bank(x.shape[0], weights.shape[1], values, gated=gated, keeps=values["keeps"]).forward_bytes()


def backward_scratch(values: Mapping[str, Any]) -> int:
    """Bytes inside `fp8_experts_backward`, from its arguments by name."""
    tokens, slots = values["weights"].shape
    gated, keeps = values["gate"] is not None, values["scales"] is not None
    bank = _bank(tokens, slots, values, gated=gated, keeps=keeps)
    biases = values["gate_bias"], values["up_bias"], values["down_bias"]
    of_gate, of_up, of_down = (0 if bias is None else bias.nbytes for bias in biases)
    return bank.backward_bytes((of_gate, of_up, of_down))


def forward_cost(values: Mapping[str, Any]) -> Cost:
    """Cost of `fp8_experts`, from its arguments by name."""
    return Cost({}, repeated_bytes=_repeated_token_bytes(values["x"], values["rows"], values["scaling"]) if values["keeps"] else 0)


def backward_cost(values: Mapping[str, Any]) -> Cost:
    """Cost of `fp8_experts_backward`, from its arguments by name."""
    up, up_out, scaling = values["up"], values["up_out"], values["scaling"]
    first = 1 if values["gate"] is None else 2
    tokens = _repeated_token_bytes(values["grad_y"], values["rows"], scaling) * (1 if values["scales"] is not None else 2)
    if values["down_bias"] is not None:  # whose gradient reads each row's token once
        tokens += _repeated_token_bytes(values["grad_y"], values["rows"], "tensor")
    whole = sum(each is None for each in (values["packed"] or [None] * 3)[:3]) - (first == 1)  # a missing gate is not packed
    return Cost({}, repeated_bytes=tokens + ((1 + first) * up_out.nbytes + whole * up.nbytes if scaling == "rows" else 0))


def _repeated_token_bytes(x: Tensor, rows: Tensor, scaling: str) -> int:
    """Bytes read repeatedly for a transposed copy of tokens' rows."""
    passes = 2 if scaling == "rows" else 1
    return (passes * rows.shape[0] - x.shape[0]) * x.shape[1] * x.itemsize
