"""Shipped configurations of the convolution kernels: a narrow and a wide row, alone and with all they can take."""

from typing import Any

from megakernels.ops.causal_conv1d import kernel


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for channels in (96, 4096):
        for dtype in ("bf16", "fp32"):
            tensors = ("x", "weight", "bias", "initial", "y", "grad_y", "grad_x", "grad_initial")
            types = dict.fromkeys(tensors, f"*{dtype}") | {"starts": "*i32", "partial": "*fp32"}
            for whole in (False, True):
                flags = {"TAPS": 4, "HAS_BIAS": True, "PACKED": whole, "HAS_INITIAL": whole, "SILU": True}
                forward, backward = kernel.forward_options(channels), kernel.backward_options(channels)
                launches = [{"num_warps": options.pop("num_warps")} for options in (forward, backward)]
                name = f"{channels} {dtype}{' packed, initial' if whole else ''}"
                found[f"conv forward {name}"] = (kernel.conv_forward_kernel, types, {**forward, **flags}, launches[0])
                needs = {"NEEDS_X": True, "NEEDS_INITIAL": whole, "NEEDS_WEIGHT": True}
                found[f"conv backward {name}"] = (kernel.conv_backward_kernel, types, {**backward, **flags, **needs}, launches[1])
    return found


CONFIGURATIONS = configurations()
