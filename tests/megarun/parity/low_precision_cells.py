"""Cells whose linears multiply in eight bits, emulated.

Scales are powers of two (`megakernels.fp8_linears`), so that layouts whose ranks scale parts of a matrix round as one process does. What is
left: rounding to eight bits turns a unit in the last place of a sum, which each layout sums in its own order, into 2^-4 of an element where
it crosses a boundary; and in a row that TP divides, an element below 2^-14 of the row's largest rounds by its part's scale. Gradients of
the first step differ by less than 4e-6 in all cells. Where such a difference is in a bias that began as zeros, AdamW makes a whole step of
it: that cell is judged by its course, gradients of every step, and both optimizers on gradients that are given. Blocks of 128 x 128 are
compared under TP where each rank has whole ones: rounding by the scale of a part moves gradients by 6e-4 otherwise.
"""

from parity_cells import C2, KERNELS, LONG, OTHER, RECOMPUTED, RESHARD, SELECTIVE, T2, T2V, TIED, V2, Cell, pattern
from parity_model import MLA

ROWS = {"precision.recipe": {"name": "fp8_rowwise"}}
CURRENT = {"precision.recipe": {"name": "fp8_current"}}
MX, NV, BLOCKS = ({"precision.recipe": {"name": name}} for name in ("mxfp8", "nvfp4", "fp8_blockwise"))
EP2 = {"dp_shard": 2, "ep": 2}
EXPERTS = {"model.moe.ffn_hidden_size": 48}
OPTIONS = {"model.moe.bias": True, "model.moe.activation": "swiglu", "model.moe.swiglu_limit": 7.0, "model.moe.shared_gate": True}
LATENT = {"model.moe.latent_size": 16, "model.moe.activation": "relu2"}
WHOLE_BLOCKS = {
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 4,
    "model.attention.head_dim": 64,
    "model.mlp.ffn_hidden_size": 256,
}
"""Widths of which each of two ranks has whole blocks of 128."""
LATE = C2 | {"context_exchange": "latents"}
WIDE_HEADS = MLA | {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 16, "q_lora_rank": 16}
"""Latent attention of which each of two groups of heads has whole blocks of 128 rows."""
DEPTHS = {"model.features.mtp": {"depth": 2, "ffn_hidden_size": 40}}


def head(name: str, **more: object) -> dict[str, object]:
    """A dense model whose head multiplies in a recipe's format, too."""
    return pattern("AD", 2) | {"precision.recipe": {"name": name, "head": True, **more}}


def core(attention: dict[str, object] | None = None, **more: object) -> dict[str, object]:
    """A dense model whose attention multiplies eight-bit operands, too."""
    given = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **more} if attention is None else attention
    return pattern("AD", 4) | {"model.attention": given, "precision.recipe": {"name": "fp8_current", "attention": True}}


def packed(name: str) -> dict[str, object]:
    """Weights that are gathered packed."""
    return {"precision.recipe": {"name": name, "param_gather": True}, **RESHARD}


def delayed(**more: object) -> dict[str, object]:
    """Delayed scaling, whose history is shorter than the steps of a cell."""
    return {"precision.recipe": {"name": "fp8_delayed", "amax_history": 2, **more}}


LOW_PRECISION_CELLS = [
    Cell("low-pp2-rows", {"pp": 2}, spec=pattern("AMDR", 4) | ROWS),
    Cell("low-pp2-current-selective", {"pp": 2}, spec=pattern("AMDR", 4) | CURRENT | SELECTIVE),
    Cell("low-tp2-current-selective", T2, spec=pattern("AMD", 3) | CURRENT | SELECTIVE, ci=True),
    Cell("low-tp2-rows", T2, spec=pattern("AMD", 3) | ROWS, by_course=True),
    Cell("low-dp2-current-reshard", {"dp_shard": 2}, spec=pattern("AMD", 3) | CURRENT | RESHARD, tolerance=OTHER),
    Cell("low-cp2-rows", C2, spec=pattern("AD", 2) | ROWS),
    Cell("low-cp2-latents-rows", LATE, spec=pattern("AD", 4, attention=MLA) | ROWS, ci=True),
    Cell("low-cp2-tp2-latents-current-selective", LATE | T2, spec=pattern("AD", 4, attention=MLA) | CURRENT | SELECTIVE),
    Cell("low-cp2-latents-mx", LATE, spec=pattern("A", 3, attention=MLA) | MX),
    Cell("low-cp2-latents-blocks", LATE, spec=pattern("A", 3, attention=WIDE_HEADS) | BLOCKS),
    Cell(
        "low-cp2-dp2-latents-rows-packed",
        LATE | {"dp_shard": 2},
        spec=pattern("AD", 2, attention=WIDE_HEADS) | packed("fp8_rowwise"),
        tolerance=OTHER,
    ),
    Cell("low-cp2-latents-blocks-narrow", LATE, spec=pattern("AD", 2, attention=MLA) | BLOCKS),
    Cell(
        "low-cp4-latents-blocks-narrow-packed",
        LATE | {"cp": 4},
        spec=pattern("A", 2, attention=WIDE_HEADS | {"v_head_dim": 16}) | packed("fp8_blockwise") | LONG,
    ),
    Cell("low-cp2-latents-blocks-packed", LATE, spec=pattern("A", 2, attention=WIDE_HEADS) | packed("fp8_blockwise")),
    Cell("low-delayed-cp2-latents", LATE, spec=pattern("AD", 4, attention=MLA) | delayed()),
    Cell("low-zbv-pp2-cp2-latents-rows", LATE | V2, "zbv", pattern("AD", 4, attention=MLA) | ROWS),
    Cell("low-pp2-experts-rows", {"pp": 2}, spec=pattern("AE", 4) | EXPERTS | ROWS),
    Cell("low-pp2-experts-current-selective", {"pp": 2}, spec=pattern("AE", 4) | EXPERTS | CURRENT | SELECTIVE),
    Cell("low-ep2-rows", EP2, spec=pattern("AE", 2) | EXPERTS | ROWS),
    Cell("low-ep2-current", EP2, spec=pattern("AE", 2) | EXPERTS | CURRENT | OPTIONS, by_course=True),
    Cell("low-tp2-ep2-rows-selective", T2 | {"ep": 2}, spec=pattern("AE", 2) | EXPERTS | ROWS | SELECTIVE),
    Cell("low-cp2-ep2-current-latent", C2 | {"ep": 2}, spec=pattern("AE", 2) | EXPERTS | CURRENT | LATENT),
    Cell("low-pp2-nv-selective", {"pp": 2}, spec=pattern("AMDR", 4) | NV | SELECTIVE),
    Cell("low-pp2-experts-nv", {"pp": 2}, spec=pattern("AE", 4) | EXPERTS | NV),
    Cell("low-tp2-mx", T2, spec=pattern("AMD", 3) | MX),
    Cell("low-tp2-blocks", T2, spec=pattern("AD", 2) | BLOCKS | WHOLE_BLOCKS),
    Cell("low-pp2-blocks-selective", {"pp": 2}, spec=pattern("AMDR", 4) | BLOCKS | SELECTIVE),
    Cell("low-ep2-blocks", EP2, spec=pattern("AE", 2) | EXPERTS | BLOCKS),
    Cell("low-ep2-mx", EP2, spec=pattern("AE", 2) | EXPERTS | MX),
    Cell("low-head-pp2-rows-tied", {"pp": 2}, spec=head("fp8_rowwise") | TIED),
    Cell("low-head-tp2-rows", T2, spec=head("fp8_rowwise", families=("A",)), ci=True),
    Cell("low-head-tp2-vocabulary-current", T2V, spec=head("fp8_current", format="e4m3")),
    Cell("low-head-joined-tp2-vocabulary-rows", T2V, spec=head("fp8_rowwise") | KERNELS),
    Cell("low-head-joined-pp2-mx-tied", {"pp": 2}, spec=head("mxfp8") | TIED | KERNELS),
    Cell("low-head-joined-dp2-depths-rows", {"dp_shard": 2}, spec=head("fp8_rowwise") | DEPTHS | KERNELS, tolerance=OTHER),
    Cell("low-head-tp2-vocabulary-depths-blocks", T2V, spec=head("fp8_blockwise") | WHOLE_BLOCKS | DEPTHS | {"model.vocab_size": 256}),
    Cell("low-head-pp2-nv", {"pp": 2}, spec=head("nvfp4")),
    Cell("low-attention-tp2", T2, spec=core(window_size=6, score_cap=15.0, gate=True)),
    Cell("low-attention-pp2-selective", {"pp": 2}, spec=core() | SELECTIVE),
    Cell("low-attention-dp2-latent-reshard", {"dp_shard": 2}, spec=core(MLA) | RESHARD, tolerance=OTHER),
    Cell("low-delayed-tp2-selective", T2, spec=pattern("AMD", 3) | delayed() | SELECTIVE, ci=True),
    Cell("low-delayed-pp2-full", {"pp": 2}, spec=pattern("AMDR", 4) | delayed() | RECOMPUTED),
    Cell("low-delayed-pp2-interleaved", {"pp": 2, "vpp": 2}, "interleaved_1f1b", spec=pattern("AMDR", 4) | delayed(margin=1)),
    Cell("low-delayed-dp2-reshard", {"dp_shard": 2}, spec=pattern("AMD", 3) | delayed(amax_compute="most_recent") | RESHARD),
    Cell("low-delayed-dp4-copies", {"dp_shard": 4}, spec=pattern("AD", 2) | delayed() | {"sharding.mode": "ddp"}),
    Cell("low-delayed-cp2", C2, spec=pattern("AD", 2) | delayed(format="e4m3")),
    Cell("low-delayed-paired-pp2", {"pp": 2}, "paired_1f1b", spec=pattern("AD", 4) | delayed()),
    Cell("low-delayed-ep2", EP2, spec=pattern("AE", 2) | EXPERTS | delayed() | OPTIONS),
    Cell("low-delayed-tp2-ep2-selective", T2 | {"ep": 2}, spec=pattern("AE", 2) | EXPERTS | delayed() | SELECTIVE),
    Cell("low-delayed-pp2-experts", {"pp": 2}, spec=pattern("AE", 4) | EXPERTS | delayed() | LATENT),
    Cell("low-delayed-head-pp2-tied", {"pp": 2}, spec=head("fp8_delayed") | TIED),
    Cell("low-delayed-head-tp2-vocabulary", T2V, spec=head("fp8_delayed")),
    Cell("low-delayed-head-joined-tp2-vocabulary", T2V, spec=head("fp8_delayed") | KERNELS),
    Cell("low-delayed-head-joined-dp2-depths", {"dp_shard": 2}, spec=head("fp8_delayed") | DEPTHS | KERNELS, tolerance=OTHER),
    Cell("low-delayed-zbv-pp2", V2, "zbv", pattern("AMDR", 4) | delayed()),
    Cell("low-zbv-pp2-rows", V2, "zbv", pattern("AMDR", 4) | ROWS, ci=True),
    Cell("low-zero-bubble-pp2-current-selective", V2, "interleaved_zero_bubble", pattern("AMDR", 4) | CURRENT | SELECTIVE),
    Cell("low-dualpipev-pp2-tp2-current-full", V2 | T2, "dualpipev", pattern("AMD", 4) | CURRENT | RECOMPUTED),
    Cell(
        "low-dualpipev-pp2-ep2-experts-blocks",
        V2 | EP2,
        "dualpipev",
        pattern("AE", 4) | EXPERTS | BLOCKS,
        num_microbatches=8,
        by_course=True,
    ),
    Cell("low-dualpipe-pp2-experts-rows", {"pp": 2}, "dualpipe", pattern("AE", 4) | EXPERTS | ROWS),
    Cell("low-zbv-pp2-nv-head", V2, "zbv", pattern("AD", 4) | {"precision.recipe": {"name": "nvfp4", "head": True}}),
    Cell("low-zbv-pp2-biased-mx", V2, "zbv", pattern("AD", 4) | MX | {"model.mlp.bias": True, "model.attention.bias": True}),
    Cell("low-dp2-experts-rows-reshard", {"dp_shard": 2}, spec=pattern("ED", 2) | EXPERTS | ROWS | RESHARD),
]
