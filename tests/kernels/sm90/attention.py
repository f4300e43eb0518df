"""Shipped configurations of the attention kernels: the head widths of published models, and the widest of each dtype."""

from typing import Any

import torch
from compile import with_measured

from megakernels.ops.attention.facts import RELATION_TILE, constants, key_parts
from megakernels.ops.attention.kernel_backward import attention_key_kernel, attention_query_kernel, attention_relation_kernel
from megakernels.ops.attention.kernel_forward import attention_forward_kernel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = {"forward": attention_forward_kernel, "query": attention_query_kernel, "key": attention_key_kernel}
PLAIN = {"HAS_WINDOW": False, "HAS_STARTS": False, "ZIG_ZAG": False, "HAS_BITS": False, "CAPPED": False, "HAS_RELATIONS": False}
EVERYTHING = PLAIN | {"HAS_WINDOW": True, "HAS_STARTS": True, "ZIG_ZAG": True}
"""Windows, documents, and the pieces of a context-parallel group."""
CAPPED, CAPPED_EVERYTHING = PLAIN | {"CAPPED": True, "HAS_WINDOW": True}, EVERYTHING | {"CAPPED": True, "HAS_RELATIONS": True}
RELATIONS = PLAIN | {"HAS_RELATIONS": True}
WORDS = {"CAPPED": "cap", "HAS_RELATIONS": "relations", "HAS_STARTS": "packed", "HAS_WINDOW": "window", "ZIG_ZAG": "pieces"}
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
        (128, 128, "bf16", RELATIONS),
        (256, 256, "bf16", CAPPED),
        (64, 64, "bf16", CAPPED_EVERYTHING),
        (128, 128, "bf16", CAPPED_EVERYTHING),
        (192, 128, "bf16", CAPPED_EVERYTHING),
        (256, 256, "bf16", EVERYTHING | {"CAPPED": True}),
        (256, 256, "bf16", EVERYTHING | {"HAS_RELATIONS": True}),
        (64, 64, "fp32", CAPPED_EVERYTHING),
    ):
        tensors = ("grad_out", "q", "k", "v", "out", "grad_q", "grad_k", "grad_v")
        types = dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(("lse", "delta", "grad_added"), "*fp32")
        types |= {"starts": "*i32", "classes": "*i32", "relations": f"*{dtype}"}
        types |= dict.fromkeys(("scale", "scale_log2", "cap", "cap_log2"), "fp32")
        strides = [f"{name}_stride_{axis}" for name in ("grad", "q", "k", "v") for axis in "bth"]
        types |= dict.fromkeys((*ALIGNED, *strides), "i32:16")
        for key, function in KERNELS.items():
            numbers, options = constants(key, width, value_width, DTYPES[dtype].itemsize, bent=flags["CAPPED"] or flags["HAS_RELATIONS"])
            name = (
                f"{width}/{value_width} {dtype}{' ' * any(flags.values())}{', '.join(word for flag, word in WORDS.items() if flags[flag])}"
            )
            if key != "key":
                found[f"attention {key} {name}"] = (function, types, {**flags, **numbers}, options)
                continue
            for part in key_parts(width, value_width, DTYPES[dtype].itemsize, relations=flags["HAS_RELATIONS"]):
                made = " and ".join(gradient for gradient, wanted in zip(("k", "v", "added"), part.values(), strict=True) if wanted)
                pieces = {"NUM_PIECES": 2 if flags["ZIG_ZAG"] else 1, **part}
                found[f"attention {key}, {made}, {name}"] = (function, types, {**flags, **numbers, **pieces}, options)
    types = {"grad_added": "*fp32", "classes": "*i32", "grad_relations": "*bf16"} | dict.fromkeys(("num_keys", "num_heads"), "i32:16")
    found["attention relations bf16"] = (attention_relation_kernel, types, dict(RELATION_TILE), {"num_warps": 4})
    return found


CONFIGURATIONS = with_measured(configurations())
