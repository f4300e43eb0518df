"""Shipped configurations of the kernels of side embeddings: the gated addition, and NAM56R's n-gram tables and fewer."""

from typing import Any

from megakernels.ops.side_embedding import kernel
from megakernels.ops.side_embedding.facts import ADD_TILE, NUM_SUMS


def configurations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    launch = {"num_warps": 4}
    for dtype in ("bf16", "fp32"):
        types = dict.fromkeys(("x", "side", "gates", "y", "grad_y", "grad_x", "grad_side", "grad_gates"), f"*{dtype}")
        types |= {"sums": "*fp32", "size": "i32:16"}
        found[f"gated_add forward {dtype}"] = (kernel.gated_add_kernel, types, {"TILE": ADD_TILE}, launch)
        needs = {"NEEDS_X": True, "NEEDS_SIDE": True, "NEEDS_GATES": True}
        found[f"gated_add backward {dtype}"] = (kernel.gated_add_backward_kernel, types, {"TILE": ADD_TILE, **needs}, launch)
        found[f"gated_add gates {dtype}"] = (kernel.gate_gradients_kernel, types, {"BLOCK": NUM_SUMS}, launch)
    for lead, tables in ((2, 16), (1, 1), (4, 33)):
        options = kernel.hash_options(tables)
        constants = {"LEAD": lead, "TABLES": options["TABLES"], "TILE": options["TILE"]}
        types = dict.fromkeys(("words", "words_before", "rows"), "*i64") | {"length": "i32:16", "num_words": "i32:16"}
        found[f"ngram_rows {lead + 1} tokens {tables} tables"] = (kernel.ngram_rows_kernel, types, constants, launch)
    return found


CONFIGURATIONS = configurations()
