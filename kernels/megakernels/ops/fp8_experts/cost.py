"""Cost of the kernels of experts in eight bits that launches do not show: rows are read for each slot, and twice for scales of columns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megakernels._common import Cost


def forward_cost(values: Mapping[str, Any]) -> Cost:
    """Cost of `fp8_experts`, from its arguments by name."""
    return Cost({}, repeated_bytes=_repeated_token_bytes(values["x"], values["rows"], values["scaling"]) if values["keeps"] else 0)


def backward_cost(values: Mapping[str, Any]) -> Cost:
    """Cost of `fp8_experts_backward`, from its arguments by name."""
    up, up_out, scaling = values["up"], values["up_out"], values["scaling"]
    first = 1 if values["gate"] is None else 2
    tokens = _repeated_token_bytes(values["grad_y"], values["rows"], scaling) * (1 if values["scales"] is not None else 2)
    if values["down_bias"] is not None:  # the gate's gradient reads each row's token once
        tokens += _repeated_token_bytes(values["grad_y"], values["rows"], "tensor")
    whole = sum(each is None for each in (values["packed"] or [None] * 3)[:3]) - (first == 1)  # a missing gate is not packed
    return Cost({}, repeated_bytes=tokens + ((1 + first) * up_out.nbytes + whole * up.nbytes if scaling == "rows" else 0))


def _repeated_token_bytes(x: Tensor, rows: Tensor, scaling: str) -> int:
    """Bytes read repeatedly for a transposed copy of tokens' rows."""
    passes = 2 if scaling == "rows" else 1
    return (passes * rows.shape[0] - x.shape[0]) * x.shape[1] * x.itemsize
