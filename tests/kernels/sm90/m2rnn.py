"""Shipped configurations of the matrix recurrence's kernels: the published model's state, a small one and the widest."""

from typing import Any

from compile import with_measured

from megakernels.ops.m2rnn import kernel
from megakernels.ops.m2rnn.facts import TILE_POSITIONS
from megakernels.ops.m2rnn.kernel_backward import m2rnn_gradient_kernel, m2rnn_recompute_kernel, m2rnn_walk_kernel
from megakernels.ops.m2rnn.kernel_forward import m2rnn_forward_kernel

TENSORS = ("grad_y", "q", "k", "v", "f", "state_map", "D", "dt_bias", "A_log", "y", "grad_v", "grad_f")
STATES = ("initial", "states", "before", "candidates", "grad_states", "grad_q_parts", "grad_k_parts", "grad_state", "shares")


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_width, value_width, dtype, whole in (
        (64, 16, "bf16", False),
        (64, 16, "bf16", True),
        (16, 8, "bf16", False),
        (128, 16, "bf16", True),
        (64, 16, "fp32", False),
        (128, 16, "fp32", True),
    ):
        types = dict.fromkeys(TENSORS, f"*{dtype}") | dict.fromkeys(STATES, "*fp32") | {"starts": "*i32"}
        strides = [f"{name}_stride_{axis}" for name in ("q", "k", "v", "grad") for axis in "bth"]
        types |= dict.fromkeys((*strides, "key_width", "value_width"), "i32:16")
        tile, spread, in_order = kernel.sides_of(key_width, value_width), kernel.spread_options(key_width), kernel.walk_options(key_width)
        packed = {**tile, "HAS_STARTS": whole}
        name = f"{key_width}x{value_width} {dtype}{' packed, continued' if whole else ''}"
        found[f"m2rnn forward {name}"] = (m2rnn_forward_kernel, types, {**packed, "HAS_INITIAL": whole}, in_order)
        found[f"m2rnn recompute {name}"] = (m2rnn_recompute_kernel, types, packed, in_order)
        found[f"m2rnn walk {name}"] = (m2rnn_walk_kernel, types, packed, in_order)
        found[f"m2rnn gradient {name}"] = (m2rnn_gradient_kernel, types, {**tile, "T": TILE_POSITIONS}, spread)
    return found


CONFIGURATIONS = with_measured(configurations())
