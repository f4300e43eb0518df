"""Shipped configurations of the rotary kernels: whole heads, half of each, and a latent attention's parts."""

from typing import Any

from megakernels.ops.rope import kernel


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    launch = {"num_warps": kernel.NUM_WARPS}
    for dtype in ("bf16", "fp32"):
        tensors = ("x", "y", "kv", "k_rope", "k", "v", "grad_k", "grad_v", "grad_kv", "grad_k_rope")
        types = dict.fromkeys(tensors, f"*{dtype}") | {"cos": "*fp32", "sin": "*fp32"}
        for straight, half in ((0, 64), (64, 32), (64, 16)):
            rows, (first, second) = kernel.tile(straight, half)
            for back in (False, True):
                constants = {"ROWS": rows, "STRAIGHT": first, "HALF": second, "BACK": back}
                found[f"rope {straight}+{2 * half} {'back' if back else 'forth'} {dtype}"] = (kernel.rope_kernel, types, constants, launch)
        for nope, value, half in ((64, 64, 16), (128, 128, 32)):
            name = f"{nope}+{2 * half}, {value} {dtype}"
            rows, (first, second, third) = kernel.tile(nope, value, half)
            constants = {"ROWS": rows, "NOPE": first, "VALUE": second, "HALF": third}
            found[f"mla_kv forward {name}"] = (kernel.mla_kv_forward_kernel, types, constants, launch)
            rows, (first, second) = kernel.tile(nope, value)
            constants = {"ROWS": rows, "NOPE": first, "VALUE": second}
            found[f"mla_kv backward {name}"] = (kernel.mla_kv_backward_kernel, types, constants, launch)
            rows, (third,) = kernel.tile(half)
            found[f"mla_kv backward of the key {name}"] = (kernel.k_rope_backward_kernel, types, {"ROWS": rows, "HALF": third}, launch)
    return found


CONFIGURATIONS = configurations()
