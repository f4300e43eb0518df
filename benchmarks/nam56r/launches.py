"""Launches of NAM56R's published Mamba-2 runs, as Megatron-Core's arguments.

Source: DatasunriseOU/cppmega at d57d1c1, recipe `nam56r_nemo_native_pretrain` and the tables of its change log of 2026-04-10: layers
AEMEAEMEAEMR with R run as M, 56 heads of 64 in attention and in Mamba (64 under fp8, whose products ask for multiples of 16) and a state of
64. The recipe's environment lets torch's segments grow.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_megatron.launches import launch_text

from megaplan.importers.megatron.spec import import_megatron

Row = dict[str, Any]
BASELINE = "native Mamba-2"
"""Phase of the rows from before CUDA graphs, fused cross entropy and the overlap of shared experts were turned on."""
GRAPHED = ("attn", "mamba", "moe_router", "moe_preprocess")
FULL_MOE = ("attn", "mamba", "moe")
ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def is_launch(row: Row) -> bool:
    """True if a run is one that Megatron-Core has the layers of: Mamba-2 for M and R, no prediction depths."""
    return row["ssm"] == "mamba2-ssd" and not row["mtp_depths"]


def arguments(row: Row) -> dict[str, Any]:
    """Launch arguments of a run, underscores for dashes."""
    letters = (row["pattern"] * 5)[: row["layers"]].translate(str.maketrans("AR", "*M"))
    heads, groups = map(int, row["attention"].removeprefix("gqa").split("/"))
    found: dict[str, Any] = {
        **{"hybrid_layer_pattern": letters, "hidden_size": row["hidden"], "ffn_hidden_size": 18944, "vocab_size": 65536},
        **{"num_attention_heads": heads, "group_query_attention": True, "num_query_groups": groups},
        **{"mamba_num_heads": 64 if "mamba heads 64" in row["note"] else 56, "mamba_state_dim": 64},
        **{"mamba_head_dim": 64, "mamba_num_groups": 8, "num_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 896},
        **{"moe_shared_expert_intermediate_size": 1024, "moe_grouped_gemm": True, "moe_aux_loss_coeff": 0.0001},
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"},
        **{"moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": True, "expert_model_parallel_size": row["ep"]},
        **{"position_embedding_type": "rope", "rotary_base": 500000, "normalization": "RMSNorm", "disable_bias_linear": True},
        **{"untie_embeddings_and_output_weights": True, "make_vocab_size_divisible_by": 128, "tokenizer_type": "NullTokenizer"},
        **{"tensor_model_parallel_size": row["tp"], "pipeline_model_parallel_size": row["pp"], "seq_length": row["seq"]},
        **{"max_position_embeddings": row["seq"], "micro_batch_size": row["mbs"], "global_batch_size": row["gbs"], "bf16": True},
        **{"use_distributed_optimizer": True, "overlap_grad_reduce": True, "no_gradient_accumulation_fusion": True},
        **{"transformer_impl": "transformer_engine", "use_mcore_models": True},
    }
    if row["tp"] > 1:
        found["sequence_parallel"] = True
    if row["tp"] > 1 or BASELINE not in row["phase"]:
        found["overlap_param_gather"] = True
    if BASELINE not in row["phase"]:
        found |= {"cross_entropy_loss_fusion": True, "moe_router_fusion": True, "moe_shared_expert_overlap": True}
    if "core_attn" in (row["recompute"] or ""):
        found |= {"recompute_granularity": "selective", "recompute_modules": "core_attn"}
    if (row["cuda_graph"] or "").startswith("te"):
        modules = FULL_MOE if "full moe" in row["cuda_graph"] else GRAPHED
        found |= {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": " ".join(modules)}
    if "capacity 1.5" in row["moe_mode"]:
        found |= {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
    if row["precision"].startswith("FP8"):
        found |= {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
    return found


def imported(row: Row) -> dict[str, Any]:
    """The document that `megaplan import megatron --gpus 8 --set device.name=h200` makes of a run's launch."""
    text, changes = launch_text(arguments(row)), ["device.name=h200"]
    return import_megatron(text, f"{row['id']}.yaml", changes, row["gpus"], environment=ENVIRONMENT).document
