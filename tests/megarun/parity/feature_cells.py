"""Cells of features: multi-token prediction, side embeddings, windows; with packed rows and over context groups."""

from typing import Any

from parity_cells import (
    C2,
    C4,
    DENSE,
    E2,
    EXPERTS,
    FEW_WORDS,
    KERNELS,
    LONG,
    MAMBA3,
    MLA,
    RECOMPUTED,
    RESHARD,
    ROUTED,
    T2,
    T2V,
    TIED,
    V2,
    Cell,
    pattern,
)

NGRAM = {"model.features.ngram": {"num_tables": 4, "num_rows": 90, "dim": 4}}
STRUCTURE = {"model.features.structure": {"num_categories": 7, "bottleneck": 6}}
PLATFORM = {"model.features.platform": {"num_categories": 5, "bottleneck": 6}}
SIDES = {"model.features.ngram": {"num_tables": 3, "num_rows": 50, "dim": 4, "max_order": 4}} | STRUCTURE
RELATIONS = {"model.features.relation_bias": {"num_relations": 7}}
MTP_TOO = {"model.features.mtp": {"depth": 2, "ffn_hidden_size": 40}}
SIDES_AHEAD = SIDES | {"model.features.mtp": {"depth": 2, "ffn_hidden_size": 40, "side_embeddings": True}}
PLATFORM_AHEAD = PLATFORM | {"model.features.mtp": {"depth": 2, "ffn_hidden_size": 40, "side_embeddings": True}}
SLIDING = {"window_size": 5, "full_layers": [2], "nope_layers": [0, 6]}
SEVERAL = {"window_size": 5, "full_layers": [2], "windows": [{"size": 3, "layers": [4]}, {"size": 9, "layers": [6]}]}
SEVERAL_WINDOWS = {"model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **SEVERAL}}
WINDOWED = {"model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **SLIDING}}


NAM56R = {
    "model.pattern": "AEMEAEMEAEMR",
    "model.num_layers": 12,
    "model.hidden_size": 256,
    "model.vocab_size": 96,
    "model.attention": {
        "kind": "mla",
        "num_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "indexer": {"num_heads": 2, "head_dim": 16, "layers": [4, 8], "top_k": 9},
        "window_size": 21,
        "full_layers": [4],
        "nope_layers": [8],
    },
    "model.mamba": {"kind": "mamba3", "head_dim": 32, "state_dim": 16, "num_groups": 4, "mimo_rank": 4, "num_angles": 4, "save_every": 8},
    "model.moe": {
        "num_experts": 16,
        "top_k": 4,
        "ffn_hidden_size": 64,
        "shared_ffn_hidden_size": 72,
        "activation": "relu2",
        "balance_loss_coefficient": 0.05,
        "z_loss_coefficient": 0.02,
    },
    "model.recurrent": {"kind": "m2rnn", "num_heads": 6, "key_dim": 16, "value_dim": 8, "conv_kernel": 4, "save_every": 8},
    "model.features.ngram": {"num_tables": 4, "num_rows": 90, "dim": 8},
    "model.features.structure": {"num_categories": 7, "bottleneck": 16},
    "model.features.mtp": {"depth": 1, "ffn_hidden_size": 320},
    "batch": {"micro_batch_size": 2, "seq_length": 32},
    "training.learning_rate": 1.0e-5,  # as GENTLE, for wider matrices: gradients' smallest entries are nearer to rounding
}
"""One period of the flagship's pattern with all that the flagship has, small."""


DEEPSEEK = pattern("AE", attention=MLA) | {
    "model.moe": {
        "num_experts": 8,
        "top_k": 2,
        "ffn_hidden_size": 24,
        "shared_ffn_hidden_size": 16,
        "score": "sigmoid",
        "expert_bias": True,
        "expert_bias_rate": 0.05,
        "num_groups": 4,
        "top_groups": 2,
        "routed_scale": 2.5,
        "balance_loss_coefficient": 0.01,
    }
}
"""DeepSeek-V3's blocks: latent attention; sigmoid scores with groups and a bias that steps move, and a shared expert."""
QWEN3_NEXT = pattern("GEAE") | {
    "model.attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "gate": True, "rotary_dim": 4},
    "model.moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "shared_gate": True},
    "model.zero_centered_norm": True,
}


REGATHERED = EXPERTS | RECOMPUTED | RESHARD


def _ahead(depth: int = 1, **more: Any) -> dict[str, Any]:
    return {"model.features.mtp": {"depth": depth, "ffn_hidden_size": 40, **more}}


FEATURE_CELLS = [
    Cell("platform-pp2-tp2", {"pp": 2} | T2, spec=DENSE | PLATFORM),
    Cell("platform-structure-packed-cp2-dp2", C2 | {"dp_shard": 2}, spec=DENSE | FEW_WORDS | PLATFORM | STRUCTURE),
    Cell("platform-ahead-pp2", {"pp": 2}, spec=DENSE | PLATFORM_AHEAD),
    # a relation bias: every stage that attends has a copy of the table, whose gradients are summed
    Cell("relations-pp2-tp2", {"pp": 2} | T2, spec=DENSE | RELATIONS),
    Cell("relations-structure-packed-cp2-dp2", C2 | {"dp_shard": 2}, spec=DENSE | FEW_WORDS | RELATIONS | STRUCTURE),
    Cell("relations-zbv-pp2-cp2", V2 | C2, "zbv", DENSE | RELATIONS | WINDOWED),
    Cell(
        "relations-latent-interleaved-pp2-recompute-reshard",
        V2,
        "interleaved_1f1b",
        pattern("AD", attention=MLA) | RELATIONS | RECOMPUTED | RESHARD,
    ),
    Cell("relations-mtp-pp4-tied", {"pp": 4}, spec=DENSE | RELATIONS | MTP_TOO | TIED),
    Cell("relations-experts-tp2-ep2-dp2", T2 | E2, spec=EXPERTS | RELATIONS),
    Cell("relations-states-cp4", C4, spec=LONG | RELATIONS | {"recompute": {"default": "selective"}}),
    # multi-token prediction: the last stage has a second copy of the embedding, whose gradient is summed with the first's
    Cell("mtp-gpipe-pp2", {"pp": 2}, "gpipe", DENSE | _ahead()),
    Cell("mtp-1f1b-pp2", {"pp": 2}, spec=_ahead()),
    Cell("mtp-1f1b-pp4-two-depths", {"pp": 4}, spec=DENSE | _ahead(2)),
    Cell("mtp-1f1b-pp2-tied", {"pp": 2}, spec=DENSE | _ahead(2) | TIED),
    Cell("mtp-looped-bfs-pp2-vpp2", V2, "looped_bfs", DENSE | _ahead()),
    Cell("mtp-interleaved-pp2-vpp2-recompute-reshard", V2, "interleaved_1f1b", _ahead() | RECOMPUTED | RESHARD),
    Cell("mtp-zero-bubble-pp2-vpp2", V2, "interleaved_zero_bubble", DENSE | _ahead(2)),
    Cell("mtp-zbv-pp2", V2, "zbv", DENSE | _ahead(2, normed_input=True)),
    Cell("mtp-zbv-pp2-tied", V2, "zbv", DENSE | _ahead() | TIED),
    Cell("mtp-dualpipev-pp2", V2, "dualpipev", DENSE | _ahead()),
    Cell("mtp-dp2", {"dp_shard": 2}, spec=DENSE | _ahead(2)),
    Cell("mtp-hsdp-2x2-pp2", {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, spec=DENSE | _ahead(), num_microbatches=8),
    Cell("mtp-tp2", T2, spec=DENSE | _ahead(2)),
    Cell("mtp-tp2-latent-zbv", T2 | V2, "zbv", pattern("AD", attention=MLA) | _ahead()),
    Cell("mtp-tp2-vocabulary-tied-pp2", T2V | {"pp": 2}, spec=DENSE | _ahead(2, normed_input=True) | TIED),
    Cell("mtp-joined-loss-pp2", {"pp": 2}, spec=DENSE | _ahead(2, normed_input=True) | KERNELS),
    Cell("mtp-joined-loss-tp2-vocabulary-tied-zbv", T2V | V2, "zbv", DENSE | _ahead(2) | TIED | KERNELS),
    Cell("mtp-joined-loss-packed-dp2", {"dp_shard": 2}, spec=DENSE | FEW_WORDS | _ahead() | KERNELS),
    Cell("mtp-ep2-router-losses", E2, spec=EXPERTS | ROUTED | _ahead()),
    Cell("mtp-swiglu-bias-pp2-tp2", {"pp": 2} | T2, spec=DENSE | _ahead(2, activation="swiglu", bias=True), ci=True),
    Cell("mtp-gelu-bias-cp2-tied", C2, spec=DENSE | TIED | _ahead(activation="gelu", bias=True)),
    # depths with a bank of experts, which pipelines, tensor, expert and context groups share as a layer's
    Cell("mtp-experts-pp2", {"pp": 2}, spec=EXPERTS | _ahead(2, experts=True)),
    Cell("mtp-experts-ep2-dp2", E2, spec=EXPERTS | ROUTED | _ahead(2, experts=True)),
    Cell("mtp-experts-pp2-tp2-ep2-bias", {"pp": 2} | T2 | {"ep": 2}, spec=DEEPSEEK | _ahead(experts=True, normed_input=True)),
    Cell("mtp-experts-pp2-ep4-cp2-tp2-bias", {"pp": 2, "ep": 4} | C2 | T2, spec=DEEPSEEK | _ahead(2, experts=True)),
    Cell("mtp-experts-zbv-pp2-ep2-tied", V2 | E2, "zbv", DEEPSEEK | TIED | _ahead(2, experts=True)),
    Cell(
        "mtp-experts-interleaved-ep2-recompute-reshard",
        V2 | E2,
        "interleaved_1f1b",
        EXPERTS | RECOMPUTED | RESHARD | _ahead(experts=True, normed_input=True),
    ),
    Cell("mtp-experts-packed-cp2-ep2-kernels", C2 | {"ep": 2}, spec=EXPERTS | ROUTED | FEW_WORDS | KERNELS | _ahead(2, experts=True)),
    Cell("mtp-experts-gated-attention-tp2-ep2", T2 | {"ep": 2}, spec=QWEN3_NEXT | _ahead(experts=True, normed_input=True)),
    # depths of other blocks, whose states context groups pass on
    Cell("mtp-state-spaces-zbv-pp2-tp2", V2 | T2, "zbv", pattern("MD") | _ahead(2, pattern="MDM", normed_input=True), by_course=True),
    Cell("mtp-delta-net-experts-cp2-ep2", C2 | {"ep": 2}, spec=pattern("GE") | _ahead(2, pattern="GE")),
    Cell("mtp-mamba3-packed-cp2-dp2", C2 | {"dp_shard": 2}, spec=pattern("MA", mamba=MAMBA3) | FEW_WORDS | _ahead(2, pattern="MA")),
    Cell("mtp-recurrence-convolution-pp2-reshard", {"pp": 2, "dp_shard": 2}, spec=pattern("RC") | RESHARD | _ahead(2, pattern="CRD")),
    Cell("mtp-convolution-alone-tp2-tied", T2, spec=pattern("CD") | TIED | _ahead(pattern="C")),
    # side embeddings of the first stage
    Cell("ngram-1f1b-pp2", {"pp": 2}, spec=DENSE | NGRAM),
    Cell("ngram-tp2", T2, spec=DENSE | NGRAM),
    Cell("ngram-tp2-vocabulary-zbv", T2V | V2, "zbv", DENSE | NGRAM),
    Cell("structure-interleaved-pp2-vpp2", V2, "interleaved_1f1b", DENSE | STRUCTURE),
    Cell("structure-tp2-dp2", T2 | {"dp_shard": 2}, spec=DENSE | STRUCTURE),
    Cell("sides-zbv-pp2-dp2", V2 | {"dp_shard": 2}, "zbv", DENSE | SIDES),
    Cell("sides-mtp-dualpipev-pp2", V2, "dualpipev", SIDES | MTP_TOO),
    Cell("sides-hsdp-2x2-reshard", {"dp_replicate": 2, "dp_shard": 2}, spec=DENSE | SIDES | RESHARD),
    Cell("sides-mtp-tp2-ep2-dp2-tied", T2 | E2, spec=EXPERTS | ROUTED | TIED | SIDES | MTP_TOO),
    # side embeddings of the depths too, of which the last of several stages has copies
    Cell("sides-ahead-pp2-dp2", {"pp": 2, "dp_shard": 2}, spec=DENSE | SIDES_AHEAD),
    Cell("sides-ahead-zbv-pp2-tp2-vocabulary-tied", V2 | T2V, "zbv", DENSE | TIED | SIDES_AHEAD),
    Cell("sides-ahead-interleaved-cp2-packed", C2 | V2, "interleaved_1f1b", DENSE | FEW_WORDS | SIDES_AHEAD),
    Cell("sides-ahead-tp2-ep2-dp2", T2 | E2, spec=EXPERTS | ROUTED | SIDES_AHEAD),
    # windows and layers without rotation, by global index, whichever stage has them
    Cell("windows-interleaved-pp2-vpp2", V2, "interleaved_1f1b", DENSE | WINDOWED),
    Cell("windows-several-pp2", {"pp": 2}, spec=DENSE | SEVERAL_WINDOWS),
    Cell("windows-several-tp2-dp2", T2 | {"dp_shard": 2}, spec=DENSE | SEVERAL_WINDOWS),
    Cell("windows-several-packed-cp2", C2, spec=DENSE | FEW_WORDS | SEVERAL_WINDOWS, ci=True),
    Cell("windows-zbv-pp2-tp2", V2 | T2, "zbv", DENSE | WINDOWED),
    Cell("windows-latent-mtp-pp4-dp2", {"pp": 4, "dp_shard": 2}, spec=pattern("AD", attention=MLA | SLIDING) | MTP_TOO, num_microbatches=8),
    # over a context group: tokens before and after a token are taken before rows are split
    Cell("mtp-cp2", C2, spec=DENSE | _ahead(2)),
    Cell("mtp-cp4-hybrid-tied", C4, spec=LONG | _ahead() | TIED),
    Cell("mtp-cp2-tp2-vocabulary-zbv", C2 | T2V | V2, "zbv", DENSE | _ahead(2)),
    Cell("mtp-cp2-latent-recompute-pp2", C2 | {"pp": 2}, spec=pattern("AD", attention=MLA) | MTP_TOO | RECOMPUTED),
    Cell("ngram-cp2-tp2", C2 | T2, spec=DENSE | NGRAM),
    Cell("sides-cp2-dp2-reshard", C2 | {"dp_shard": 2}, spec=DENSE | SIDES | RESHARD),
    Cell("sides-mtp-cp2-ep2-pp2-router-losses", C2 | {"ep": 2, "pp": 2}, spec=EXPERTS | ROUTED | SIDES | MTP_TOO),
    Cell("windows-cp2-interleaved", C2 | V2, "interleaved_1f1b", DENSE | WINDOWED),
    # the flagship's period, its features and losses together
    Cell("nam56r-pp2-cp2", {"pp": 2, "vpp": 2} | C2, "interleaved_1f1b", NAM56R | {"recompute.blocks": {"M": "selective"}}),
    Cell("nam56r-packed-pp2-cp2", {"pp": 2} | C2, spec=NAM56R | FEW_WORDS),
    # packed rows: no neighbour of a token is of another document
    Cell("mtp-packed-pp2", {"pp": 2}, spec=DENSE | FEW_WORDS | _ahead(2)),
    Cell("mtp-packed-tp2-dp2", T2 | {"dp_shard": 2}, spec=DENSE | FEW_WORDS | _ahead(2)),
    Cell("sides-packed-zbv-pp2", V2, "zbv", DENSE | FEW_WORDS | SIDES),
    Cell("sides-mtp-packed-cp2-pp2", C2 | {"pp": 2}, spec=FEW_WORDS | SIDES | MTP_TOO),
    Cell("windows-packed-cp2-tp2", C2 | T2, spec=DENSE | FEW_WORDS | WINDOWED),
    Cell("sides-mtp-packed-steps2-pp2", {"pp": 2}, spec=DENSE | FEW_WORDS | SIDES | MTP_TOO, updates_after=2),
]
