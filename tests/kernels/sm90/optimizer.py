"""Shipped configurations of the optimizers' updates: dense and strided, with fp32 and bf16 gradients."""

from typing import Any

from megakernels.ops.optimizer import kernel
from megakernels.ops.optimizer.facts import ADAMW_BLOCK, UPDATE_BLOCK

SIZES = ("num_elements", "num_rows", "num_cols", "matrix_stride", "row_stride", "col_stride")
NUMBERS = (
    *("moving", "ahead", "weight_decay", "factor"),
    *("beta1", "beta2", "bits1", "bits2", "eps"),
)
FP32 = dict.fromkeys(("momentum", "weight", "first", "second", "step"), "*fp32") | dict.fromkeys(("rate", "scale"), "*fp64")


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    launch = {"num_warps": 4}
    for gradient in ("fp32", "bf16"):
        types = FP32 | {"gradient": f"*{gradient}", "update": "*bf16"} | dict.fromkeys(SIZES, "i32:16") | dict.fromkeys(NUMBERS, "fp32")
        for dense in (True, False):
            layout, constants = "" if dense else ", strided", {"BLOCK": UPDATE_BLOCK, "DENSE": dense}
            found[f"nesterov {gradient}{layout}"] = (kernel.nesterov_kernel, types, constants, launch)
            if gradient == "fp32":
                found[f"decayed_add{layout}"] = (kernel.decayed_add_kernel, types, constants, launch)
        found[f"adamw {gradient}"] = (kernel.adamw_kernel, types, {"BLOCK": ADAMW_BLOCK}, launch)
    return found


CONFIGURATIONS = configurations()
