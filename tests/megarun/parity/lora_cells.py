"""Cells of adapters on a frozen model: every axis, families, partial choices and a schedule that splits backwards."""

from parity_cells import C2, RESHARD, SELECTIVE, T2, V2, Cell, pattern
from parity_model import KDA, MLA

LATE = C2 | {"context_exchange": "latents"}
LORA = {"lora": {"rank": 3, "alpha": 6.0}}
QUERIES = {"lora": {"rank": 3, "alpha": 6.0, "families": ["q_proj", "o_proj", "up_proj"]}}
NF4 = {"lora": {"rank": 3, "alpha": 6.0, "base": "nf4", "base_block": 4}}
INT8 = {
    "lora": {"rank": 3, "alpha": 6.0, "base": "int8", "base_block": 4, "double_quant": False, "families": ["q_proj", "o_proj", "up_proj"]}
}
DENSE = pattern("AD", 4) | LORA
EXPERTS = pattern("AE", 4) | LORA
LORA_CELLS = [
    Cell("lora-pp2", {"pp": 2}, spec=DENSE),
    Cell("lora-pp2-tied", {"pp": 2}, spec=DENSE | {"model.tie_embeddings": True}),
    Cell("lora-zbv", V2, "zbv", DENSE),
    Cell("lora-interleaved-experts", V2, "interleaved_1f1b", EXPERTS),
    Cell(
        "lora-dp2-reshard-sides",
        {"dp_shard": 2},
        spec=DENSE | RESHARD | {"model.features": {"ngram": {"num_tables": 3, "num_rows": 40, "dim": 4}}},
    ),
    Cell("lora-dp2-dp2", {"dp_shard": 2, "dp_replicate": 2}, spec=DENSE | SELECTIVE),
    Cell("lora-tp2", T2, spec=DENSE),
    Cell("lora-tp2-queries", T2, spec=pattern("AD", 4) | QUERIES | SELECTIVE),
    Cell("lora-tp2-words", T2 | {"vocab_parallel": True}, spec=DENSE | {"recompute": {"default": "full"}}),
    Cell("lora-tp2-latent", T2, spec=pattern("AD", 4, attention=MLA) | LORA),
    Cell("lora-tp2-bias", T2, spec=DENSE | {"model.attention.bias": True, "model.attention.output_bias": True, "model.mlp.bias": True}),
    Cell("lora-cp2", C2, spec=DENSE),
    Cell("lora-cp2-tp2-dp2", C2 | T2 | {"dp_shard": 2}, spec=DENSE),
    Cell("lora-cp2-latents", LATE, spec=pattern("AD", 4, attention=MLA) | LORA, ci=True),
    Cell("lora-cp4-tp2-latents-selective", LATE | T2 | {"cp": 4}, spec=pattern("AD", 4, attention=MLA) | LORA | SELECTIVE),
    Cell("lora-cp2-dp2-latents-others", LATE | {"dp_shard": 2}, spec=pattern("AD", 4, attention=MLA) | QUERIES | RESHARD),
    Cell("nf4-cp2-tp2-latents", LATE | T2, spec=pattern("AD", 4, attention=MLA) | NF4, by_course=True),
    Cell("int8-cp2-dp2-latents", LATE | {"dp_shard": 2}, spec=pattern("AD", 4, attention=MLA) | INT8 | RESHARD),
    Cell("lora-cp2-mamba", C2, spec=pattern("MD", 4) | LORA),
    Cell("lora-cp2-mamba1", C2, spec=pattern("MD", 4, mamba={"kind": "mamba1", "state_dim": 8, "dt_rank": 4}) | LORA),
    Cell("lora-cp2-mamba3", C2, spec=pattern("MD", 4, mamba={"kind": "mamba3", "head_dim": 16, "state_dim": 8}) | LORA),
    Cell("lora-cp2-recurrent", C2, spec=pattern("RD", 4) | LORA, by_course=True),
    Cell("lora-cp2-delta", C2, spec=pattern("GD", 4) | LORA, by_course=True),
    Cell("lora-cp2-short", C2, spec=pattern("CD", 4, short_convolution={"conv_kernel": 3, "bias": True}) | LORA),
    Cell("lora-ep2", {"dp_shard": 2, "ep": 2}, spec=EXPERTS, ci=True),
    Cell("lora-tp2-ep2-dp2", T2 | {"dp_shard": 2, "ep": 2}, spec=EXPERTS | RESHARD),
    Cell("lora-tp2-mamba", T2, spec=pattern("MD", 4) | LORA),
    Cell("lora-pp2-tp2-shared-norms", {"pp": 2, **T2}, spec=pattern("MAD", 6) | LORA | {"model.parallel_layers": [1, 4]}),
    Cell(
        "lora-dp2-shared-norm-of-three", {"dp_shard": 2, "ep": 2}, spec=pattern("MADEA", 5) | QUERIES | {"model.parallel_layers": [1, 2, 3]}
    ),
    Cell("lora-tp2-recurrent", T2, spec=pattern("RD", 4) | LORA, by_course=True),
    Cell("lora-tp2-delta", T2, spec=pattern("GD", 4) | LORA, by_course=True),
    Cell("lora-tp2-kda", T2, spec=pattern("GD", 4, linear_attention=KDA) | LORA),
    Cell("nf4-pp2", {"pp": 2}, spec=pattern("AD", 4) | NF4),
    Cell("nf4-dp2-reshard", {"dp_shard": 2}, spec=pattern("AD", 4) | NF4 | RESHARD),
    Cell("nf4-dp2-dp2-selective", {"dp_shard": 2, "dp_replicate": 2}, spec=pattern("AD", 4) | NF4 | SELECTIVE),
    Cell("nf4-tp2-dp2", T2 | {"dp_shard": 2}, spec=pattern("AD", 4) | NF4, ci=True),
    Cell("nf4-tp2-latent", T2, spec=pattern("AD", 4, attention=MLA) | NF4, by_course=True),
    Cell("nf4-cp2-mamba", C2, spec=pattern("MD", 4) | NF4),
    Cell("int8-zbv", V2, "zbv", pattern("AD", 4) | INT8),
    Cell("int8-tp2-bias", T2, spec=pattern("AD", 4) | INT8 | {"model.attention.bias": True, "model.attention.output_bias": True}),
    Cell("int8-ep2", {"dp_shard": 2, "ep": 2}, spec=pattern("AE", 4) | INT8 | RESHARD),
    Cell("lora-pp2-hybrid", {"pp": 2, "tp": 2, "dp_shard": 2}, spec=pattern("AMEDR", 5) | LORA, spans=[[0, 3], [3, 5]], by_course=True),
]
