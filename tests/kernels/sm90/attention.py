"""Shipped configurations of the attention kernels: the head widths of published models, and the widest of each dtype."""

from typing import Any

import torch

from megakernels.ops.attention.kernel_backward import attention_key_kernel, attention_query_kernel
from megakernels.ops.attention.kernel_forward import attention_forward_kernel
from megakernels.ops.attention.sizes import constants, key_parts

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = {"forward": attention_forward_kernel, "query": attention_query_kernel, "key": attention_key_kernel}
PLAIN = {"HAS_WINDOW": False, "HAS_STARTS": False, "ZIG_ZAG": False, "HAS_BITS": False}
EVERYTHING = {"HAS_WINDOW": True, "HAS_STARTS": True, "ZIG_ZAG": True, "HAS_BITS": False}
"""Windows, documents, and the pieces of a context-parallel group."""
ALIGNED = ("num_queries", "num_keys", "piece_length", "first_a", "first_b", "key_length")


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for width, value_width, dtype, flags in (
        (64, 64, "bf16", PLAIN),
        (96, 64, "bf16", PLAIN),
        (96, 64, "bf16", EVERYTHING),
        (128, 128, "bf16", PLAIN),
        (128, 128, "bf16", EVERYTHING),
        (192, 128, "bf16", PLAIN),
        (256, 256, "bf16", PLAIN),
        (64, 64, "fp32", EVERYTHING),
        (32, 32, "fp32", PLAIN),
    ):
        tensors = ("grad_out", "q", "k", "v", "out", "grad_q", "grad_k", "grad_v")
        types = dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(("lse", "delta"), "*fp32")
        types |= {"starts": "*i32", "scale": "fp32", "scale_log2": "fp32"}
        strides = [f"{name}_stride_{axis}" for name in ("grad", "q", "k", "v") for axis in "bth"]
        types |= dict.fromkeys((*ALIGNED, *strides), "i32:16")
        for key, function in KERNELS.items():
            numbers, options = constants(key, width, value_width, DTYPES[dtype])
            kind = " packed, window, pieces" if flags is EVERYTHING else ""
            name = f"{width}/{value_width} {dtype}{kind}"
            if key != "key":
                found[f"attention {key} {name}"] = (function, types, {**flags, **numbers}, options)
                continue
            for part in key_parts(width, value_width, DTYPES[dtype]):
                made = " and ".join(gradient for gradient, wanted in zip("kv", part.values(), strict=True) if wanted)
                pieces = {"NUM_PIECES": 2 if flags["ZIG_ZAG"] else 1, **part}
                found[f"attention {key}, {made}, {name}"] = (function, types, {**flags, **numbers, **pieces}, options)
    return found


CONFIGURATIONS = configurations()
