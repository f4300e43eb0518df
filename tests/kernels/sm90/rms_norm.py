"""Shipped configurations of the norm kernels: rows in runs, a narrow, a hidden and the widest group."""

from typing import Any

from megakernels.ops.rms_norm import kernel
from megakernels.ops.rms_norm.facts import LARGEST_GATED_FP32_WIDTH, NORM_LARGEST_WIDTH


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for width in (128, 200, 896, 3584, NORM_LARGEST_WIDTH):
        for dtype in ("bf16", "fp32"):
            tensors = dict.fromkeys(("x", "gate", "weight", "total", "y", "grad_y", "grad_x", "grad_gate"), f"*{dtype}")
            sizes = {} if width % 16 else dict.fromkeys(("width", "x_stride", "x_step", "gate_stride", "grad_stride"), "i32:16")
            types = tensors | sizes | {"rstd": "*fp32", "partial": "*fp32", "eps": "fp32"}
            wide = width > LARGEST_GATED_FP32_WIDTH and dtype == "fp32"
            for kind in ("",) if wide else ("nested_",) if width == 128 else ("", "gated_", "add_"):
                name, gated = f"{kind}rms_norm", kind == "gated_"
                options = kernel.launch_options(width, adds=kind == "add_")
                launch = {"num_warps": options["num_warps"]}
                kinds = {"NESTED": kind == "nested_", "GATED": gated, "ADDS": kind == "add_", "OFFSET": 0.0}
                forward = {**kinds, "ROWS": options["ROWS"], "BLOCK": options["BLOCK"]}
                found[f"{name} forward {width} {dtype}"] = (kernel.rms_norm_forward_kernel, types, forward, launch)
                backward = {**forward, "NEEDS_X": True, "NEEDS_GATE": gated}
                found[f"{name} backward {width} {dtype}"] = (kernel.rms_norm_backward_kernel, types, backward, launch)
    return found


CONFIGURATIONS = configurations()
