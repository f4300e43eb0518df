"""Shipped configurations of the cross entropy's kernels: a small and a large vocabulary, or slice of one."""

from typing import Any

from megakernels.ops.cross_entropy import kernel


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in ("bf16", "fp32"):
        numbers = dict.fromkeys(("lse", "chosen", "slope", "share"), "*fp32")
        types = {"logits": f"*{dtype}", "grad": f"*{dtype}", "labels": "*i64", "row_stride": "i32:16", "num_words": "i32:16", **numbers}
        for num_words in (1000, 131072):
            for name, function, made in (
                ("statistics", kernel.statistics_kernel, kernel.statistics_options),
                ("gradient", kernel.gradient_kernel, kernel.gradient_options),
            ):
                options = made(num_words)
                launch = {"num_warps": options.pop("num_warps")}
                found[f"{name} {num_words} {dtype}"] = (function, types, options, launch)
    return found


CONFIGURATIONS = configurations()
