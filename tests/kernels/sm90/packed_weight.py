"""Shipped configurations of the kernel that makes the matrix of packed rows."""

from typing import Any

from megakernels.ops.packed_weight import kernel
from megakernels.ops.packed_weight.facts import PACKED_TILE


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in ("bf16", "fp32"):
        types = {"packed": "*u8", "made": f"*{dtype}", "inverse": "fp32", "columns": "i32:16"}
        for four in (True, False):
            for nested in (True, False):
                constants = {"BLOCK": 64, "NESTED": nested, "FOUR_BITS": four, "TILE": PACKED_TILE}
                name = f"unpacked {'nf4' if four else 'int8'}{', nested' if nested else ''} {dtype}"
                found[name] = (kernel.unpack_kernel, types, constants, {"num_warps": kernel.NUM_WARPS})
    return found


CONFIGURATIONS = configurations()
