"""Shipped configurations of the kernels of the selective scan: few and many channels, whole sequences and pieces of packed rows."""

from typing import Any

import torch

from megakernels.ops.selective_scan import facts, kernel
from megakernels.ops.selective_scan.inputs import SelectiveScanInputs

FP32 = ("states", "last", "first", "grad_last", "recomputed", "parts", "sums", "grad_first")
SIZES = (*(f"{each}_{step}" for each in ("grad", "x", "dt", "B", "C") for step in ("row", "stride")), "num_positions", "num_channels")


def given(channels: int, width: int) -> SelectiveScanInputs:
    empty = torch.empty(0)
    return SelectiveScanInputs(empty, empty, torch.empty(channels, width, device="meta"), empty, empty, empty, empty, None, 1)


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for channels, width, whole in ((40, 7, False), (8192, 16, False), (8192, 16, True)):
        for dtype in ("bf16", "fp32"):
            tensors = ("x", "dt", "A_log", "B", "C", "D", "dt_bias", "y", "grad_y", "grad_x", "grad_dt")
            types = dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(FP32, "*fp32") | {"starts": "*i32"}
            types |= dict.fromkeys((*SIZES, "save_every", "state_width") if width % 16 == 0 else (), "i32:16")
            name = f"{channels}x{width} {dtype}{' packed, piece' if whole else ''}"
            for side, options_of, function, flag in (
                ("forward", kernel.forward_options, kernel.selective_forward_kernel, "HAS_FIRST"),
                ("backward", kernel.backward_options, kernel.selective_backward_kernel, "HAS_LAST"),
            ):
                options = options_of(given(channels, width))
                launch = {"num_warps": options.pop("num_warps")}
                found[f"selective {side} {name}"] = (function, types, {**options, "PACKED": whole, flag: whole}, launch)
    return found


CONFIGURATIONS = configurations()

SHAPE = "4 sequences of 4,096 positions of 8,192 channels with 16 states, bf16, saved every 256"
BATCH, POSITIONS, CHANNELS, SEGMENT = 4, 4096, 8192, 256
ELEMENTS = BATCH * POSITIONS * CHANNELS
"""Elements of x: positions of channels, each with all its states."""
LAUNCHES = {
    "selective forward 8192x16 bf16": (BATCH * CHANNELS // facts.SELECTIVE_FORWARD_CHANNELS, (POSITIONS // SEGMENT, SEGMENT)),
    "selective backward 8192x16 bf16": (
        BATCH * CHANNELS // facts.SELECTIVE_BACKWARD_CHANNELS,
        (POSITIONS // SEGMENT, SEGMENT // facts.GROUP_POSITIONS, SEGMENT // facts.GROUP_POSITIONS),
    ),
}
