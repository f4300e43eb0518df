"""Shipped configurations of the matrix recurrence's kernels: the published model's state, a small one and the widest."""

from typing import Any

from megakernels.ops.m2rnn import kernel
from megakernels.ops.m2rnn.facts import MAP_ROWS
from megakernels.ops.m2rnn.kernel_backward import m2rnn_backward_kernel
from megakernels.ops.m2rnn.kernel_forward import m2rnn_forward_kernel

TENSORS = ("grad_y", "q", "k", "v", "f", "state_map", "D", "dt_bias", "A_log", "y", "grad_v", "grad_f")
STATES = ("initial", "states", "recomputed", "grad_q_parts", "grad_k_parts", "grad_state", "grad_map", "grad_D", "grad_scalars")


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
        tile, forward = (options(key_width, value_width) for options in (kernel.launch_options, kernel.forward_options))
        launch, of_forward = ({"num_warps": each.pop("num_warps")} for each in (tile, forward))
        tile["HAS_STARTS"] = whole
        name = f"{key_width}x{value_width} {dtype}{' packed, continued' if whole else ''}"
        found[f"m2rnn forward {name}"] = (m2rnn_forward_kernel, types, {**tile, "HAS_INITIAL": whole}, of_forward)
        found[f"m2rnn backward {name}"] = (m2rnn_backward_kernel, types, {**tile, "ROWS": MAP_ROWS}, launch)
    return found


CONFIGURATIONS = configurations()
