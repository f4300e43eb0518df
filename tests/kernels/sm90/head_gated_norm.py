"""Shipped configurations of the head norm's kernels: odd, usual and the widest heads."""

from typing import Any

from megakernels.ops.head_gated_norm import kernel
from megakernels.ops.head_gated_norm.facts import HEAD_LARGEST_WIDTH


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for width in (40, 128, 256, HEAD_LARGEST_WIDTH):
        for dtype in ("bf16", "fp32"):
            tensors = dict.fromkeys(("x", "gate", "weight", "y", "grad_y", "grad_x", "grad_gate"), f"*{dtype}")
            sizes = {} if width % 16 else dict.fromkeys(("width", "x_stride", "gate_stride", "grad_stride"), "i32:16")
            types = tensors | sizes | {"rstd": "*fp32", "partial": "*fp32", "eps": "fp32"}
            options = kernel.launch_options(width)
            launch, tile = (
                {"num_warps": options["num_warps"]},
                {"ROWS": options["ROWS"], "BLOCK": options["BLOCK"], "SIGMOID": width == 128},
            )
            found[f"head_gated_norm forward {width} {dtype}"] = (kernel.head_gated_norm_forward_kernel, types, tile, launch)
            backward = {**tile, "NEEDS_X": True, "NEEDS_GATE": True}
            found[f"head_gated_norm backward {width} {dtype}"] = (kernel.head_gated_norm_backward_kernel, types, backward, launch)
    return found


CONFIGURATIONS = configurations()
