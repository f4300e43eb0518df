"""Bytes that the experts' MLPs in eight bits hold inside themselves on CUDA, for given tensors, by the facts of their sizes.

Plain torch's own intermediates between products are not counted, as those of `experts` are not.
"""

from collections.abc import Mapping
from typing import Any

from megakernels._common import chooses_triton
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
