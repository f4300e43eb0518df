"""Shipped configurations of the symmetric products: small and large matrices, tall ones, and polynomials of x xᵀ."""

import itertools
from typing import Any

from megakernels.ops.newton_schulz import kernel


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4)):
        types = dict.fromkeys(("a", "b", "added", "y"), f"*{dtype}") | {"scales": "*fp32", **dict.fromkeys(NUMBERS, "fp32")}
        for num_rows in (64, 200):
            for added, dense in itertools.product((False, True), ("col_stride", "row_stride")):
                sizes = dict.fromkeys({"num_rows", "num_cols", "matrix_stride", "row_stride", "col_stride"} - {dense}, "i32:16")
                options = kernel.launch_options(num_rows, element_bytes)
                launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
                addend, layout = " with an addend" if added else "", ", transposed" if dense == "row_stride" else ""
                name = f"symmetric_product {num_rows} {dtype}{addend}{layout}"
                constants = {**options, "ADDED": added, "SCALED": not added, dense: 1}
                found[name] = (kernel.symmetric_product_kernel, types | sizes, constants, launch)
    return found | bands()


NUMBERS = ("alpha", "beta", "diagonal")


def bands() -> dict[str, Any]:
    """x xᵀ in fp16, its polynomial, and the polynomial of a segment in bf16."""
    found: dict[str, Any] = {}
    for name, dtype, result, tall, added in (
        ("bf16", "bf16", "fp16", False, False),
        ("bf16, tall", "bf16", "fp16", True, False),
        ("fp16 with an addend", "fp16", "fp16", False, True),
        ("fp16 to bf16", "fp16", "bf16", False, False),
    ):
        options = dict(kernel.BAND_OPTIONS)
        launch = {key: options.pop(key) for key in ("num_warps", "num_stages")}
        tile, step = options["TILE"], options["STEP"]
        boxes = [[step, rows] if tall else [rows, step] for rows in (tile, 2 * tile)]
        types = {key: f"tensordesc<{dtype}[{box[0]},{box[1]}]>" for key, box in zip("ab", boxes, strict=True)}
        types |= dict.fromkeys(("added", "y"), f"tensordesc<{result}[1,{tile},{tile}]>") | dict.fromkeys(NUMBERS, "fp32")
        types |= {"scales": "*fp32", "num_rows": "i32:16", "num_cols": "i32:16"}
        constants = {**options, "TALL": tall, "ADDED": added, "SCALED": not added}
        found[f"symmetric_bands {name}"] = (kernel.symmetric_bands_kernel, types, constants, launch)
    return found


CONFIGURATIONS = configurations()
