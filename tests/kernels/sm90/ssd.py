"""Shipped configurations of the scan's kernels: the head and state widths of published models, and the widest of each dtype."""

from typing import Any

import torch

from megakernels.ops.ssd import kernel
from megakernels.ops.ssd.kernel_backward import ssd_backward_kernel, ssd_state_gradient_kernel
from megakernels.ops.ssd.kernel_forward import ssd_forward_kernel
from megakernels.ops.ssd.kernel_groups import ssd_group_kernel, ssd_sums_kernel

INPUTS = ("x", "dt", "A_log", "B", "C", "D", "dt_bias", "grad_y", "y", "states", "grad_states", "grad_x")
GROUP = ("own", "other", "keys", "boundary", "gradient")
ACCUMULATED = ("initial", "final", "grad_final", "grad_initial", "shares", "steps", "sums", "rests", "grad_dt_parts")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for head_width, state_width, dtype, whole in (
        (64, 128, "bf16", False),
        (64, 128, "bf16", True),
        (128, 128, "bf16", False),
        (32, 32, "bf16", False),
        (32, 32, "fp32", True),
    ):
        types = dict.fromkeys((*INPUTS, *GROUP), f"*{dtype}") | dict.fromkeys(ACCUMULATED, "*fp32")
        types |= {"starts": "*i32", "dt_min": "fp32", "dt_max": "fp32"}
        strides = [f"{name}_stride_{axis}" for name in ("x", "B", "C", "grad", "own", "other", "keys") for axis in "bthg"]
        types |= dict.fromkeys((*strides, "head_width", "state_width", "chunk_size"), "i32:16")
        sides = kernel.tile_sides(256, head_width, state_width, DTYPES[dtype])
        tile = {**sides, "HAS_STARTS": whole}
        name = f"{head_width}x{state_width} {dtype}{' packed, continued' if whole else ''}"
        for key, function, constants in (
            ("forward", ssd_forward_kernel, {**tile, "HAS_INITIAL": whole}),
            ("state_gradient", ssd_state_gradient_kernel, {**tile, "HAS_FINAL": whole}),
            ("backward", ssd_backward_kernel, tile),
            ("sums", ssd_sums_kernel, {"Q": sides["Q"]}),
            ("group", ssd_group_kernel, {**tile, "QUERIES": True}),
            ("group", ssd_group_kernel, {**tile, "QUERIES": False}),
        ):
            part = {True: " of C", False: " of B"}[constants["QUERIES"]] if key == "group" else ""
            found[f"ssd {key}{part} {name}"] = (function, types, constants, {"num_warps": kernel.WARPS[key]})
    return found


CONFIGURATIONS = configurations()
