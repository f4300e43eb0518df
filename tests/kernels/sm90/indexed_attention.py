"""Shipped configurations of the kernels of indexed attention: index heads of NAM56R and DeepSeek-V3.2, and attention with a mask."""

from typing import Any

import torch
import triton.language as tl

from megakernels.ops.attention.kernel_backward import attention_key_kernel, attention_query_kernel
from megakernels.ops.attention.kernel_forward import attention_forward_kernel
from megakernels.ops.attention.tiles.facts import constants, key_parts
from megakernels.ops.indexed_attention.facts import (
    KEY_WARPS,
    difference_constants,
    index_constants,
    mass_constants,
    rows_constants,
    select_constants,
)
from megakernels.ops.indexed_attention.kernel_gradients import (
    index_difference_kernel,
    index_key_kernel,
    index_mass_kernel,
    index_query_kernel,
)
from megakernels.ops.indexed_attention.kernel_index import (
    index_keys_backward_kernel,
    index_keys_kernel,
    index_score_kernel,
    index_select_kernel,
    index_turn_kernel,
)

PLAIN = {"HAS_WINDOW": False, "HAS_STARTS": False}
EVERYTHING = {"HAS_WINDOW": True, "HAS_STARTS": True}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALIGNED = (
    "num_queries",
    "num_keys",
    "offset",
    "piece_first",
    "first",
    "num_rows",
    "num_columns",
    "key_length",
    "num_words",
    "num_positions",
)
FP32 = (
    "keys",
    "grad_keys",
    "parts",
    "cos",
    "sin",
    "scores",
    "masses",
    "differences",
    "thresholds",
    "index_lse",
    "lse",
    "delta",
    "queries",
)
FLOATS = ("factor", "eps", "loss_factor", "scale", "scale_log2")


def types_of(dtype: str) -> dict[str, str]:
    own = (
        "q",
        "k",
        "v",
        "out",
        "grad_out",
        "grad_q",
        "grad_k",
        "grad_v",
        "weights",
        "grad_weights",
        "x",
        "grad_x",
        "scale",
        "bias",
        "turned_x",
    )
    found = dict.fromkeys(own, f"*{dtype}") | dict.fromkeys(FP32, "*fp32") | dict.fromkeys(("starts", "bits"), "*i32")
    strides = [f"{name}_stride_{axis}" for name in ("grad", "q", "k", "v") for axis in "bth"]
    return found | dict.fromkeys((*ALIGNED, *strides, "angle_stride_t"), "i32:16")


def numbers_of(types: dict[str, str]) -> dict[str, str]:
    return types | dict.fromkeys(FLOATS, "fp32")


def index_kernels(width: int, dtype: str, flags: dict[str, bool]) -> dict[str, Any]:
    types, zig_zag = types_of(dtype), {"ZIG_ZAG": flags["HAS_STARTS"]}
    numbers, name = numbers_of(types), f"{width} {dtype}{' packed, window, pieces' if flags['HAS_STARTS'] else ''}"
    found: dict[str, Any] = {}
    for key, function in (("score", index_score_kernel), ("query", index_query_kernel), ("key", index_key_kernel)):
        constants_of, options = index_constants(key, width, DTYPES[dtype].itemsize)
        narrow = {} if key == "score" else {"DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]}
        found[f"index {key} {name}"] = (function, numbers, {**constants_of, **flags, **zig_zag, **narrow}, options)
    if flags is PLAIN:
        rows = rows_constants(width)
        norm = types | {"eps": "fp32"}
        found[f"index turn {name}"] = (index_turn_kernel, types | {"turned_x": "*fp32"}, {**rows, "BACK": False}, {})
        found[f"index keys {name}"] = (index_keys_kernel, norm, rows, {})
        found[f"index keys backward {name}"] = (index_keys_backward_kernel, norm, rows, {"num_warps": KEY_WARPS})
    return found


def attention_kernels(width: int, value_width: int, dtype: str, flags: dict[str, bool]) -> dict[str, Any]:
    types, masked = types_of(dtype), {**flags, "ZIG_ZAG": flags["HAS_STARTS"]}
    numbers, name = numbers_of(types), f"{width}/{value_width} {dtype}{' packed, window, pieces' if flags['HAS_STARTS'] else ''}"
    constants_of, options = mass_constants(width, DTYPES[dtype].itemsize)
    found: dict[str, Any] = {f"index mass {name}": (index_mass_kernel, numbers, {**constants_of, **masked}, options)}
    kernels = {"forward": attention_forward_kernel, "query": attention_query_kernel, "key": attention_key_kernel}
    for key, function in kernels.items():
        constants_of, options = constants(key, width, value_width, DTYPES[dtype].itemsize, masked=True, pieces=masked["ZIG_ZAG"])
        parts = [{"NUM_PIECES": 1 + masked["ZIG_ZAG"], **part} for part in key_parts(width, value_width, DTYPES[dtype].itemsize)]
        for number, part in enumerate(parts if key == "key" else [{}]):
            of_part = f" {number}" if number else ""
            found[f"masked attention {key}{of_part} {name}"] = (
                function,
                numbers,
                {**masked, "HAS_BITS": True, "CAPPED": False, "HAS_RELATIONS": False, **constants_of, **part},
                options,
            )
    return found


def row_kernels(num_keys: int, flags: dict[str, bool]) -> dict[str, Any]:
    numbers, name = numbers_of(types_of("bf16")), f"{num_keys} keys{' packed, window' if flags['HAS_STARTS'] else ''}"
    constants_of, options = select_constants(num_keys)
    return {
        f"index select {name}": (index_select_kernel, numbers, {**constants_of, **flags, "SEARCH": True}, options),
        f"index select again {name}": (index_select_kernel, numbers, {**constants_of, **flags, "SEARCH": False}, options),
        f"index difference {name}": (index_difference_kernel, numbers, {**difference_constants(num_keys), **flags}, {}),
    }


CONFIGURATIONS = {
    **index_kernels(64, "bf16", PLAIN),
    **index_kernels(64, "bf16", EVERYTHING),
    **index_kernels(64, "fp32", EVERYTHING),
    **index_kernels(96, "bf16", EVERYTHING),
    **index_kernels(128, "bf16", PLAIN),
    **index_kernels(128, "bf16", EVERYTHING),
    **index_kernels(128, "fp32", EVERYTHING),
    **attention_kernels(64, 64, "bf16", PLAIN),
    **attention_kernels(96, 64, "bf16", PLAIN),
    **attention_kernels(96, 64, "bf16", EVERYTHING),
    **attention_kernels(192, 128, "bf16", PLAIN),
    **attention_kernels(192, 128, "bf16", EVERYTHING),
    **attention_kernels(256, 256, "bf16", EVERYTHING),
    **attention_kernels(64, 64, "fp32", PLAIN),
    **attention_kernels(64, 64, "fp32", EVERYTHING),
    **attention_kernels(32, 32, "fp32", EVERYTHING),
    **row_kernels(4096, PLAIN),
    **row_kernels(4096, EVERYTHING),
    **row_kernels(8192, EVERYTHING),
    **row_kernels(131072, PLAIN),
}
