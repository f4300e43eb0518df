"""Shipped configurations of the convolution kernels: a narrow and a wide row, alone and with all they can take."""

from typing import Any

import torch

from megakernels.ops.causal_conv1d import kernel
from megakernels.ops.causal_conv1d.facts import CONV_BACKWARD_POSITIONS, CONV_FORWARD_POSITIONS


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for channels in (96, 4096):
        for dtype, stored in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            tensors = ("x", "weight", "bias", "initial", "y", "grad_y", "grad_x", "grad_initial")
            types = dict.fromkeys(tensors, f"*{dtype}") | {"starts": "*i32", "partial": "*fp32"}
            types |= dict.fromkeys(("grad_row", "x_row", "x_stride", "num_positions", "num_channels"), "i32:16")
            widths = dict.fromkeys(("grad_stride", "x_stride", "num_channels"), channels)
            for whole in (False, True):
                flags = {"TAPS": 4, "HAS_BIAS": True, "PACKED": whole, "HAS_INITIAL": whole, "SILU": True}
                forward, backward = kernel.forward_options(channels), kernel.backward_options(channels, stored)
                launches = [{"num_warps": options.pop("num_warps")} for options in (forward, backward)]
                name = f"{channels} {dtype}{' packed, initial' if whole else ''}"
                found[f"conv forward {name}"] = (kernel.conv_forward_kernel, types, {**forward, **flags}, launches[0])
                needs = {"NEEDS_X": True, "NEEDS_INITIAL": whole, "NEEDS_WEIGHT": True}
                found[f"conv backward {name}"] = (kernel.conv_backward_kernel, types, {**backward, **widths, **flags, **needs}, launches[1])
    return found


CONFIGURATIONS = configurations()

SHAPE = "16,384 positions of 4,096 channels, bf16, bias and silu"
ROWS, WIDTH = 16384, 4096
ELEMENTS = ROWS * WIDTH


def launches() -> dict[str, Any]:
    """Programs and turns of the loop at `SHAPE`: a walk takes four positions together, backward two and three more in all."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, positions, taken, options in (
        ("forward", CONV_FORWARD_POSITIONS, 4, kernel.forward_options(WIDTH)),
        ("backward", CONV_BACKWARD_POSITIONS, 2, kernel.backward_options(WIDTH, torch.bfloat16)),
    ):
        programs = ROWS // positions * (WIDTH // options["CHANNELS"])
        found[f"conv {name} {WIDTH} bf16"] = (programs, (-(-positions // taken),))
    return found


LAUNCHES = launches()
