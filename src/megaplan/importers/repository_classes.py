"""Defaults of classes that come with published weights and that transformers does not have.

Sources: `configuration_bailing_moe.py` of inclusionAI/Ling, `configuration_bailing_moe_v2.py` of inclusionAI/Ling-V2, and
`configuration_decilm.py` of the Llama-Nemotron models, which extends Llama's class.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple


class RepositoryClass(NamedTuple):
    """A class of a repository of weights.

    Attributes:
        name: Class with a head over the vocabulary.
        fields: Fields with their defaults.
        extends: Model type whose fields it has, too; empty for none.
    """

    name: str
    fields: MappingProxyType[str, Any]
    extends: str = ""


_LING: dict[str, Any] = {
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "max_window_layers": 20,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "output_dropout": 0.0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000.0,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_qkv_bias": False,
}
REPOSITORY_CLASSES: MappingProxyType[str, RepositoryClass] = MappingProxyType(
    {
        "bailing_moe": RepositoryClass(
            "BailingMoeForCausalLM",
            MappingProxyType(
                _LING
                | {
                    "attention_dropout": 0.1,
                    "embedding_dropout": 0.1,
                    "first_k_dense_replace": 0,
                    "head_dim": None,
                    "hidden_size": 1024,
                    "intermediate_size": None,
                    "max_window_layers": 28,
                    "moe_intermediate_size": None,
                    "norm_head": False,
                    "norm_topk_prob": True,
                    "num_experts": 16,
                    "num_experts_per_tok": 2,
                    "num_hidden_layers": 24,
                    "num_key_value_heads": 0,
                    "num_shared_experts": 0,
                    "output_dropout": 0.1,
                    "rms_norm_eps": 1e-05,
                    "rope_theta": 10000.0,
                    "sliding_window": 4096,
                    "use_bias": True,
                    "use_sliding_window": False,
                    "vocab_size": 30592,
                }
            ),
        ),
        "bailing_moe_v2": RepositoryClass(
            "BailingMoeV2ForCausalLM",
            MappingProxyType(
                _LING
                | {
                    "first_k_dense_replace": 1,
                    "head_dim": 128,
                    "intermediate_size": 5120,
                    "moe_router_enable_expert_bias": True,
                    "mtp_loss_scaling_factor": 0,
                    "n_group": 8,
                    "num_experts": 256,
                    "num_hidden_layers": 20,
                    "num_key_value_heads": 4,
                    "num_nextn_predict_layers": 0,
                    "num_shared_experts": 1,
                    "routed_scaling_factor": 1.0,
                    "topk_group": 4,
                    "use_qk_norm": True,
                    "vocab_size": 157184,
                }
            ),
        ),
        "nemotron-nas": RepositoryClass(
            "DeciLMForCausalLM",
            MappingProxyType({"block_configs": None, "intermediate_size": None, "num_key_value_heads": None}),
            "llama",
        ),
    }
)
"""Classes by model type; fields that they share with every class of transformers are not listed."""
