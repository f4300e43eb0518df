"""Shipped configurations of the kernels of experts in eight bits: each dtype, scales of all and of own columns, kinds of activations."""

from typing import Any

from moe import KINDS_OF, split

from megakernels.ops.activation.kernel import KINDS
from megakernels.ops.fp8_experts import kernel
from megakernels.ops.fp8_experts.facts import BETWEEN_TILE, TURNED_TILE
from megakernels.ops.moe.kernel_products import CLAMPED

NUM_EXPERTS = 128
GATED = (KINDS["swiglu"], KINDS["geglu"], CLAMPED)
SIZES = ("num_rows", "num_columns", "num_cols", "stride", "copy_columns")


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    tile, launch = split(BETWEEN_TILE)
    side, group_launch = split(TURNED_TILE)
    for dtype in ("bf16", "fp32"):
        own = ("x", "gate_out", "up_out", "hidden", "pulled", "grad_gate_out", "grad_up_out", "out", "bias", "gate_bias", "up_bias")
        types = (
            dict.fromkeys(own, f"*{dtype}")
            | dict.fromkeys(("rows", "ends", "stops", "largest_seen"), "*i32")
            | dict.fromkeys(SIZES, "i32:16")
        )
        types |= dict.fromkeys(("one", "scales", "weights", "grad_weights"), "*fp32") | {"data": "*u8", "limit": "fp32"}
        for gathers in (False, True):
            for scaled in ("whole", "columns", "delayed"):
                of = {"OWN": scaled == "columns", "GIVEN": scaled == "delayed", "LIMIT": 448.0}
                constants = {"GATHERS": gathers, **of, "EXPONENT": 8, "FRACTION_BITS": 3, **side}
                name = f"fp8 experts copy, {scaled} {dtype}{' of tokens' if gathers else ''}"
                found[name] = (kernel.fp8_group_kernel, types, constants, group_launch)
        for activation, kind, biased in KINDS_OF:
            name = f"{activation}{' clamped' if kind == CLAMPED else ''}{', biases,' if biased else ''} {dtype}"
            gated = kind in GATED
            constants = {"KIND": kind, "GATED": gated, "HAS_UP_BIAS": biased, "HAS_GATE_BIAS": biased and gated, "EXPERTS": NUM_EXPERTS}
            found[f"fp8 hidden {name}"] = (kernel.fp8_hidden_kernel, types, {**constants, **tile}, launch)
            if not biased or kind == CLAMPED:
                found[f"fp8 pull {name}"] = (kernel.fp8_pull_kernel, types, {"KIND": kind, "GATED": gated, **tile}, launch)
        found[f"fp8 down bias {dtype}"] = (kernel.fp8_down_bias_kernel, types, {"EXPERTS": NUM_EXPERTS, **tile}, launch)
    return found


CONFIGURATIONS = configurations()
