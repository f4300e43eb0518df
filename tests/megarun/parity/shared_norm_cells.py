"""Cells whose layers share a norm, with what separates the norm from one of the two layers that read it.

That is whole-block recompute of the layer that makes it, a schedule that splits the backward, and a recipe of low precision.
"""

from parity_cells import RECOMPUTED, RESHARD, SELECTIVE, T2, V2, Cell, pattern

PAIRS = pattern("AD", 8) | {"model.parallel_layers": [1, 3, 5, 7]}
THREE = pattern("ADD", 6) | {"model.parallel_layers": [1, 2, 4, 5]}
LETTERS = pattern("MAD", 6) | {"model.parallel_layers": [1, 4]}
EXPERTS = pattern("ED", 8) | {"model.parallel_layers": [1, 3, 5, 7], "model.moe.ffn_hidden_size": 48}
ROWS, CURRENT, DELAYED = ({"precision.recipe": {"name": name}} for name in ("fp8_rowwise", "fp8_current", "fp8_delayed"))
OF_MLP = {"precision.recipe": {"name": "fp8_current", "families": ("D",)}}
SHARED_NORM_CELLS = [
    Cell("shared-norm-pp2-full", {"pp": 2}, spec=PAIRS | RECOMPUTED, ci=True),
    Cell("shared-norm-tp2-full", T2, spec=THREE | RECOMPUTED),
    Cell("shared-norm-zbv-pp2", V2, "zbv", PAIRS),
    Cell("shared-norm-zbv-pp2-full-reshard", V2, "zbv", PAIRS | RECOMPUTED | RESHARD),
    Cell("shared-norm-zero-bubble-pp2-experts", V2, "interleaved_zero_bubble", EXPERTS),
    Cell("shared-norm-dualpipev-pp2-tp2-full", V2 | T2, "dualpipev", PAIRS | RECOMPUTED),
    Cell("shared-norm-dualpipe-pp2", {"pp": 2}, "dualpipe", PAIRS | SELECTIVE),
    Cell("shared-norm-pp2-rows", {"pp": 2}, spec=LETTERS | ROWS, spans=[[0, 3], [3, 6]]),
    Cell("shared-norm-tp2-current-of-mlp", T2, spec=LETTERS | OF_MLP),
    Cell("shared-norm-pp2-delayed-full", {"pp": 2}, spec=PAIRS | DELAYED | RECOMPUTED),
    Cell("shared-norm-zbv-pp2-current", V2, "zbv", PAIRS | CURRENT),
]
