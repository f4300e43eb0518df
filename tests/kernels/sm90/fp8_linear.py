"""Shipped configurations of the kernels of eight-bit copies: each dtype, what has a scale, and both formats, as given and transposed."""

from typing import Any

import torch

from megakernels.ops.fp8_linear import facts, kernel

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALED = {"whole": facts.WHOLE, "rows": facts.BY_ROW, "columns": facts.BY_COLUMN}
SIZES = ("num_rows", "num_columns", "stride", "copy_rows", "copy_columns", "num", "num_padded")


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    options, tile = {"num_warps": kernel.NUM_WARPS}, {"SIDE": facts.SCALED_TILE}
    counts = dict.fromkeys(SIZES, "i32:16")
    for dtype in ("bf16", "fp32"):
        types = {"x": f"*{dtype}", "scales": "*fp32", "maxima": "*i32", "data": "*u8", "low": "*u8"} | counts
        for name, scaled in SCALED.items():
            found[f"fp8 maxima, {name} {dtype}"] = (kernel.fp8_maxima_kernel, types, {**tile, "SCALED": scaled}, options)
            for format, stored in FORMATS.items():
                for turned in (False,) if name == "rows" else (False, True):
                    constants = {**tile, "SCALED": scaled, "TURNED": turned, "FRACTION_BITS": kernel.FRACTION_BITS[stored]}
                    key = f"fp8 round, {name} {dtype} to {format}{' transposed' if turned else ''}"
                    found[key] = (kernel.fp8_round_kernel, types, constants, options)
        for format, stored in FORMATS.items():
            for turned in (False, True):
                limit = {"FRACTION_BITS": kernel.FRACTION_BITS[stored], "LIMIT": torch.finfo(stored).max}
                own = types | {"factor": "*fp32", "largest": "*i32", "scale": "*fp32"}
                key = f"fp8 delayed {dtype} to {format}{' transposed' if turned else ''}"
                found[key] = (kernel.fp8_delayed_kernel, own, {**tile, "TURNED": turned, **limit}, options)
            constants = {"EXPONENT": kernel.LARGEST_EXPONENT[stored], "FRACTION_BITS": kernel.FRACTION_BITS[stored]}
            for width in (64, 4096, facts.LONGEST_ROW):
                found[f"fp8 rows of {width} {dtype} to {format}"] = (
                    kernel.fp8_row_kernel, types, {**kernel.row_tile(width), **constants}, options
                )  # fmt: skip
    for name, sides in (("whole", kernel.ONE_SCALE), ("rows or columns", kernel.MANY_SCALES)):
        constants = {"EXPONENT": kernel.LARGEST_EXPONENT[FORMATS["e4m3"]], **sides}
        found[f"fp8 scale, {name}"] = (kernel.fp8_scale_kernel, types, constants, options)
    found["fp8 turn"] = (kernel.fp8_turn_kernel, types, tile, options)
    return found


CONFIGURATIONS = configurations()
