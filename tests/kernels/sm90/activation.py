"""Shipped configurations of the activation kernels: a narrow width and any above a tile's."""

from typing import Any

from megakernels.ops.activation import kernel, kernel_xielu
from megakernels.ops.activation.facts import NUM_XIELU_SUMS, XIELU_TILE


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for width in (200, 14336):
        options = kernel.launch_options(width)
        tile = {"ROWS": options["ROWS"], "BLOCK": options["BLOCK"]}
        launch = {"num_warps": options["num_warps"]}
        for dtype in ("bf16", "fp32"):
            sizes = {} if width % 16 else dict.fromkeys(("width", "x_stride", "up_stride", "grad_stride"), "i32:16")
            types = sizes | dict.fromkeys(("x", "up", "y", "grad_y", "grad_x", "grad_up"), f"*{dtype}")
            for name, kind in kernel.KINDS.items():
                forward = {**tile, "KIND": kind}
                found[f"{name} forward {width} {dtype}"] = (kernel.activation_forward_kernel, types, forward, launch)
                backward = {**forward, "NEEDS_X": True, "NEEDS_UP": name in ("swiglu", "geglu", "relu2glu")}
                found[f"{name} backward {width} {dtype}"] = (kernel.activation_backward_kernel, types, backward, launch)
    for dtype in ("bf16", "fp32"):
        types = dict.fromkeys(("x", "alphas", "y", "grad_y", "grad_x", "grad_alphas"), f"*{dtype}") | {"sums": "*fp32", "size": "i32:16"}
        tile, launch = {"TILE": XIELU_TILE}, {"num_warps": 4}
        found[f"xielu forward {dtype}"] = (kernel_xielu.activation_xielu_forward_kernel, types, tile, launch)
        needs = {**tile, "NEEDS_X": True, "NEEDS_ALPHAS": True}
        found[f"xielu backward {dtype}"] = (kernel_xielu.activation_xielu_backward_kernel, types, needs, launch)
        found[f"xielu alphas {dtype}"] = (kernel_xielu.activation_xielu_alphas_kernel, types, {"BLOCK": NUM_XIELU_SUMS}, launch)
    return found


CONFIGURATIONS = configurations()
