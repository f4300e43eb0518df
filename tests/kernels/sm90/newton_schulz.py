"""Shipped configurations of the symmetric product: a small and a large matrix, alone and with an addend, and its transpose."""

import itertools
from typing import Any

from megakernels.ops.newton_schulz import kernel


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4)):
        types = dict.fromkeys(("x", "added", "y"), f"*{dtype}") | {"alpha": "fp32", "beta": "fp32"}
        for num_rows in (64, 3584):
            for added, dense in itertools.product((False, True), ("x_col_stride", "x_row_stride")):
                sizes = dict.fromkeys({"num_rows", "num_cols", "x_matrix_stride", "x_row_stride", "x_col_stride"} - {dense}, "i32:16")
                options = kernel.launch_options(num_rows, element_bytes)
                launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
                addend, layout = " with an addend" if added else "", ", transposed" if dense == "x_row_stride" else ""
                name = f"symmetric_product {num_rows} {dtype}{addend}{layout}"
                found[name] = (kernel.symmetric_product_kernel, types | sizes, {**options, "ADDED": added, dense: 1}, launch)
    return found


CONFIGURATIONS = configurations()
