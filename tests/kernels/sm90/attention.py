"""Shipped configurations of the attention kernels: the head widths of published models, and the widest of each dtype."""

from typing import Any

import torch
from compile import with_measured

from megakernels.ops.attention.kernel import HAS_REGISTERS
from megakernels.ops.attention.kernel_backward import attention_key_kernel, attention_query_kernel, attention_relation_kernel
from megakernels.ops.attention.kernel_forward import attention_forward_kernel
from megakernels.ops.attention.stored.facts import (
    DELTA_ROWS,
    PRODUCT_OPTIONS,
    SCORE_OPTIONS,
    SCORE_TILE,
    STORED_STEP,
    STORED_TILE,
    score_columns,
)
from megakernels.ops.attention.stored.kernel import (
    attention_delta_kernel,
    attention_product_key_kernel,
    attention_product_query_kernel,
    attention_score_kernel,
)
from megakernels.ops.attention.tiles.facts import RELATION_TILE, constants, key_parts, split_width

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = {"forward": attention_forward_kernel, "query": attention_query_kernel, "key": attention_key_kernel}
PLAIN = {"HAS_WINDOW": False, "HAS_STARTS": False, "ZIG_ZAG": False, "HAS_BITS": False, "CAPPED": False, "HAS_RELATIONS": False}
EVERYTHING = PLAIN | {"HAS_WINDOW": True, "HAS_STARTS": True, "ZIG_ZAG": True}
"""Windows, documents, and the pieces of a context-parallel group."""
CAPPED, CAPPED_EVERYTHING = PLAIN | {"CAPPED": True, "HAS_WINDOW": True}, EVERYTHING | {"CAPPED": True, "HAS_RELATIONS": True}
WINDOW = PLAIN | {"HAS_WINDOW": True}
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
        (128, 128, "bf16", WINDOW),
        (96, 64, "bf16", WINDOW),
        (96, 64, "bf16", WINDOW | {"HAS_STARTS": True}),
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
            place = {"pieces": flags["ZIG_ZAG"], "large": HAS_REGISTERS and not flags["HAS_STARTS"]} if key == "key" else {}
            bent = flags["CAPPED"] or flags["HAS_RELATIONS"]
            numbers, options = constants(key, width, value_width, DTYPES[dtype].itemsize, bent=bent, **place)
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
    return found | stored()


def stored() -> dict[str, Any]:
    """The kernels of stored scores: wide heads, caps, windows and documents."""
    found: dict[str, Any] = {}
    tensors = ("grad_out", "q", "k", "v", "out", "grad_q", "grad_k", "store", "weights_store", "grads_store")
    types = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(("lse", "delta"), "*fp32") | {"starts": "*i32"}
    types |= dict.fromkeys(("scale", "cap"), "fp32")
    strides = [f"{name}_stride_{axis}" for name in ("grad", "q", "k", "v") for axis in "bth"]
    types |= dict.fromkeys(("num_queries", "num_slots", *strides), "i32:16")
    for width, value_width, flags in (
        (256, 256, PLAIN),
        (192, 128, PLAIN),
        (256, 256, CAPPED),
        (128, 128, CAPPED),
        (192, 128, PLAIN | {"HAS_STARTS": True, "HAS_WINDOW": True}),
    ):
        sides = {"S": STORED_TILE, "HAS_WINDOW": flags["HAS_WINDOW"], "HAS_STARTS": flags["HAS_STARTS"]}
        name = f"{width}/{value_width} bf16{' ' * any(flags.values())}{', '.join(word for flag, word in WORDS.items() if flags[flag])}"
        score = {**SCORE_TILE, "C": score_columns(width, value_width), "WIDTH": width, "VALUE": value_width, "CAPPED": flags["CAPPED"]}
        columns = {"WIDTH": width, **dict(zip("DR", split_width(width), strict=True)), **sides}
        found[f"attention scores {name}"] = (attention_score_kernel, types, {**score, **sides}, SCORE_OPTIONS)
        found[f"attention product, query, {name}"] = (
            attention_product_query_kernel, types, {**columns, "N": STORED_STEP}, PRODUCT_OPTIONS
        )  # fmt: skip
        found[f"attention product, key, {name}"] = (attention_product_key_kernel, types, {**columns, "M": STORED_STEP}, PRODUCT_OPTIONS)
    found["attention delta 256 bf16"] = (attention_delta_kernel, types, {"VALUE": 256, "V": 256, "M": DELTA_ROWS}, {"num_warps": 4})
    return found


CONFIGURATIONS = with_measured(configurations())
