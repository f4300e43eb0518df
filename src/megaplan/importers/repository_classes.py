"""Defaults of classes that are published with weights and not in transformers.

Sources: `configuration_bailing_moe.py` of inclusionAI/Ling, `configuration_bailing_moe_v2.py` of inclusionAI/Ling-V2, and
`configuration_decilm.py` of the Llama-Nemotron models, which extends Llama's class; `configuration_*.py` next to the weights of
internlm/internlm2-7b, internlm/internlm-7b, baichuan-inc/Baichuan2-7B-Base, openbmb/MiniCPM-2B-sft-bf16, Qwen/Qwen-7B, THUDM/chatglm3-6b,
deepseek-ai/deepseek-moe-16b-base, OrionStarAI/Orion-14B-Base, TeleAI/TeleChat3-36B-Thinking, GSAI-ML/LLaDA-8B-Base, apple/OpenELM-1_1B,
tencent/Tencent-Hunyuan-Large, meituan-longcat/LongCat-Flash-Lite, MiniMaxAI/MiniMax-Text-01, stepfun-ai/step3, WisdomShell/CodeShell-7B,
microsoft/Phi-3-small-8k-instruct, allenai/OLMo-7B, hpcai-tech/grok-1, xai-org/grok-2, and early revisions of microsoft/phi-2,
stabilityai/stablelm-3b-4e1t and tiiuae/falcon-40b;
`model/model_minimind.py` of jingyaogong/minimind, `configuration_rugpt3xl.py` of EvilFreelancer/rugpt3xl-convert;
`models/config_mamba.py` and `modules` of state-spaces/mamba; `models/gated_deltanet` and `models/transformer` of
fla-org/flash-linear-attention.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class RepositoryClass(NamedTuple):
    """A class of a repository of weights.

    Attributes:
        name: Class with a head over the vocabulary.
        fields: Fields with their defaults.
        extends: Model type whose fields it has, too; empty for none.
        renamed: Fields of that type that have other names here.
    """

    name: str
    fields: MappingProxyType[str, Any]
    extends: str = ""
    renamed: MappingProxyType[str, str] = MappingProxyType({})


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
_LLAMA: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Defaults of classes that are made of Llama's."""
_MINIMIND = _LLAMA | {
    "hidden_size": 768, "intermediate_size": 2432, "num_attention_heads": 8, "num_hidden_layers": 8, "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
_MINIMIND_BEFORE = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers", "norm_eps": "rms_norm_eps",
}  # fmt: skip
"""Names of MiniMind's fields before it had Llama's."""
_FLA: dict[str, Any] = {
    "attnres_block_size": None,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 2048,
    "intermediate_size": None,
    "norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
"""Defaults of classes of flash-linear-attention."""
_GPT2: dict[str, Any] = {
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "layer_norm_epsilon": 1e-05,
    "n_inner": None,
    "tie_word_embeddings": True,
}
"""Defaults of classes that are made of GPT-2's."""
_MINIMAX: tuple[dict[str, str], dict[str, Any]] = (
    {
        f"layernorm_{own}_{part}": f"{name}_{part}_factor"
        for own, name in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
        for part in ("alpha", "beta")
    },
    {"attn_type_list": None, "rotary_dim": None, "shared_intermediate_size": 0},
)
"""Other names of minimax's fields, and further fields, before transformers had the class."""
_REFINED = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"}
_EPOCH = {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor", "num_heads": "num_attention_heads"}
"""Names of the fields of falcon and stablelm before transformers had the classes."""


_GROK: dict[str, Any] = {
    **dict.fromkeys(("attn_logit_softcapping", "attn_output_multiplier", "attn_temperature_len", "final_logit_softcapping")),
    **dict.fromkeys(("global_attn_every_n", "max_attn_value", "rope_scaling", "router_logit_softcapping", "sliding_window_size")),
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
}
"""Fields of Grok's classes that may be absent."""


def _of(name: str, extends: str = "", renamed: Mapping[str, str] = MappingProxyType({}), **fields: Any) -> RepositoryClass:
    return RepositoryClass(name, MappingProxyType(fields), extends, MappingProxyType(dict(renamed)))


_LATER: dict[str, RepositoryClass] = {
    "RefinedWeb": _of("RWForCausalLM", "falcon", _REFINED, new_decoder_architecture=True, num_kv_heads=8),
    "RefinedWebModel": _of("RWForCausalLM", "falcon", _REFINED),
    "codeshell": _of(
        "CodeShellForCausalLM", activation_function="gelu_pytorch_tanh", group_query_attention=True, n_embd=4096, n_head=32, n_layer=42,
        num_query_groups=1, position_embedding_type="learned_absolute", rope_scaling=None, vocab_size=70144, **_GPT2,
    ),
    "grok-1": _of("Grok1ModelForCausalLM", **_GROK),
    "grok-2": _of("Grok1ForCausalLM", **_GROK),
    "hf_olmo": _of(
        "OLMoForCausalLM", "llada", activation_type="swiglu", attention_dropout=0.1, block_type="sequential", clip_qkv=None, d_model=768,
        embedding_dropout=0.1, embedding_layer_norm=False, embedding_size=50304, include_bias=True, layer_norm_type="default",
        layer_norm_with_affine=True, mlp_hidden_size=None, mlp_ratio=4, n_heads=12, n_layers=12, residual_dropout=0.1, rope=False,
        vocab_size=50257, weight_tying=True,
    ),
    "rugpt3xl": _of(
        "RuGPT3XLForCausalLM", hidden_act="gelu_new", hidden_size=2048, intermediate_size=8192, layer_norm_eps=1e-05,
        max_position_embeddings=2048, num_attention_heads=16, num_hidden_layers=24, output_dropout=0.1, sparse_mode="alternating",
        tie_word_embeddings=False, vocab_size=50264,
    ),
    "minimind": _of(
        "MiniMindForCausalLM", renamed=_MINIMIND_BEFORE, head_dim=None, moe_intermediate_size=None, norm_topk_prob=True,
        num_experts=4, num_experts_per_tok=1, num_key_value_heads=4, use_moe=False, vocab_size=6400, **_MINIMIND,
    ),
    "hunyuan": _of(
        "HunYuanForCausalLM", "llama", {"attention_head_dim": "head_dim"}, cla_share_factor=1, moe_topk=1, num_experts=1,
        num_shared_expert=1, use_cla=False, use_mixed_mlp_moe=False, use_mla=False, use_qk_norm=False,
    ),
    "longcat_flash_ngram": _of(
        "LongcatFlashNgramForCausalLM", "longcat_flash", emb_neighbor_num=None, emb_split_num=None, ngram_vocab_size_ratio=None
    ),
    "mamba_ssm": _of(
        "MambaLMHeadModel", attn_layer_idx=None, d_intermediate=0, fused_add_norm=True, pad_vocab_size_multiple=8, residual_in_fp32=True,
        rms_norm=True, tie_embeddings=True, vocab_size=50277,
    ),
    "mixformer-sequential": _of("MixFormerSequentialForCausalLM", "phi-msft", architecture=None, flash_rotary=False, fused_dense=False),
    "minimax_m1": _of("MiniMaxM1ForCausalLM", "minimax", _MINIMAX[0], **_MINIMAX[1]),
    "minimax_text_01": _of("MiniMaxText01ForCausalLM", "minimax", _MINIMAX[0], **_MINIMAX[1]),
    "phi-msft": _of(
        "PhiForCausalLM", activation_function="gelu_new", n_embd=1024, n_head=16, n_head_kv=None, n_layer=20, rotary_dim=32,
        vocab_size=50304, **(_GPT2 | {"tie_word_embeddings": False}),
    ),
    "phi3small": _of(
        "Phi3SmallForCausalLM", "", {"ff_intermediate_size": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps"},
        ff_dim_multiplier=None, hidden_act="gegelu", hidden_size=4096, intermediate_size=14336, layer_norm_eps=1e-05,
        mup_attn_multiplier=1.0, mup_embedding_multiplier=10.0, mup_use_scaling=True, mup_width_multiplier=8.0, num_attention_heads=32,
        num_hidden_layers=32, num_key_value_heads=8, rope_embedding_base=1000000, tie_word_embeddings=True, vocab_size=100352,
    ),
    "stablelm_epoch": _of("StableLMEpochForCausalLM", "stablelm", _EPOCH),
    "step3_text": _of(
        "Step3TextForCausalLM", "llama", head_dim=256, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=5120,
        moe_layers_enum=None, moe_num_experts=48, moe_top_k=3, norm_expert_weight=False, num_attention_groups=1, num_attention_heads=64,
        num_hidden_layers=61, rms_norm_eps=1e-05, rope_theta=500000.0, share_expert_dim=5120, share_q_dim=2048, vocab_size=128815,
    ),
}  # fmt: skip
REPOSITORY_CLASSES: MappingProxyType[str, RepositoryClass] = MappingProxyType(
    _LATER
    | {
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
        "baichuan": RepositoryClass("BaichuanForCausalLM", MappingProxyType(_LLAMA | {"vocab_size": 125696, "z_loss_weight": 0})),
        "chatglm": RepositoryClass(
            "ChatGLMModel",  # as published configs name it
            MappingProxyType(
                {
                    "add_bias_linear": False,
                    "add_qkv_bias": False,
                    "apply_residual_connection_post_layernorm": False,
                    "attention_dropout": 0.0,
                    "ffn_hidden_size": 13696,
                    "hidden_dropout": 0.0,
                    "hidden_size": 4096,
                    "kv_channels": 128,
                    "layernorm_epsilon": 1e-05,
                    "multi_query_attention": False,
                    "multi_query_group_num": 1,
                    "num_attention_heads": 32,
                    "num_layers": 28,
                    "padded_vocab_size": 65024,
                    "post_layer_norm": True,
                    "rmsnorm": True,
                    "tie_word_embeddings": False,
                }
            ),
        ),
        "deepseek": RepositoryClass(
            "DeepseekForCausalLM",
            MappingProxyType(
                _LLAMA
                | {
                    "attention_bias": False,
                    "attention_dropout": 0.0,
                    "first_k_dense_replace": 0,
                    "moe_intermediate_size": 1407,
                    "moe_layer_freq": 1,
                    "n_routed_experts": None,
                    "n_shared_experts": None,
                    "norm_topk_prob": False,
                    "num_experts_per_tok": None,
                    "num_hidden_layers": 30,
                    "num_key_value_heads": 32,
                    "scoring_func": "softmax",
                    "vocab_size": 102400,
                }
            ),
        ),
        "internlm": RepositoryClass("InternLMForCausalLM", MappingProxyType(_LLAMA | {"bias": True, "vocab_size": 103168})),
        "internlm2": RepositoryClass(
            "InternLM2ForCausalLM", MappingProxyType(_LLAMA | {"bias": True, "num_key_value_heads": None, "vocab_size": 103168})
        ),
        "gated_deltanet": RepositoryClass(
            "GatedDeltaNetForCausalLM",
            MappingProxyType(
                _FLA
                | {
                    "allow_neg_eigval": False,
                    "attn": None,
                    "conv_size": 4,
                    "expand_v": 2.0,
                    "head_dim": 256,
                    "num_heads": 6,
                    "num_hidden_layers": 21,
                    "num_v_heads": None,
                    "use_gate": True,
                    "use_short_conv": True,
                }
            ),
        ),
        "llada": RepositoryClass(
            "LLaDAModelLM",
            MappingProxyType(
                {
                    "activation_type": "silu",
                    "embedding_size": None,
                    "include_bias": False,
                    "include_qkv_bias": False,
                    "n_kv_heads": None,
                    "rms_norm_eps": 1e-05,
                    "rope_theta": 10000.0,
                    "weight_tying": False,
                }
                | dict.fromkeys(
                    ("block_type", "layer_norm_type", "rope", "alibi", "input_emb_norm", "attention_layer_norm", "bias_for_layer_norm"),
                    None,
                )
                | dict.fromkeys(("scale_logits", "multi_query_attention", "embedding_layer_norm"), None)
            ),
        ),
        "openelm": RepositoryClass(
            "OpenELMForCausalLM",
            MappingProxyType(
                {
                    "activation_fn_name": "swish",
                    "ffn_dim_divisor": 256,
                    "ffn_with_glu": True,
                    "head_dim": 128,
                    "model_dim": 2048,
                    "normalization_layer_name": "rms_norm",
                    "normalize_qk_projections": False,
                    "num_transformer_layers": 12,
                    "rope_freq_constant": 10000,
                    "share_input_output_layers": True,
                    "vocab_size": 32000,
                }
            ),
        ),
        "minicpm": RepositoryClass(
            "MiniCPMForCausalLM",
            MappingProxyType(
                _LLAMA
                | {
                    "attention_bias": False,
                    "attention_dropout": 0.0,
                    "dim_model_base": 1,
                    "num_key_value_heads": None,
                    "scale_depth": 1,
                    "scale_emb": 1,
                    "tie_word_embeddings": True,
                    "vocab_size": 32000,
                }
            ),
        ),
        "orion": RepositoryClass("OrionForCausalLM", MappingProxyType(_LLAMA | {"num_key_value_heads": None})),
        "qwen": RepositoryClass(
            "QWenLMHeadModel",
            MappingProxyType(
                {
                    "attn_dropout_prob": 0.0,
                    "emb_dropout_prob": 0.0,
                    "hidden_size": 4096,
                    "intermediate_size": 22016,
                    "kv_channels": 128,
                    "layer_norm_epsilon": 1e-06,
                    "no_bias": True,
                    "num_attention_heads": 32,
                    "num_hidden_layers": 32,
                    "rope_scaling": None,
                    "rotary_emb_base": 10000,
                    "rotary_pct": 1.0,
                    "tie_word_embeddings": False,
                    "vocab_size": 151936,
                }
            ),
        ),
        "telechat3": RepositoryClass("Telechat3ForCausalLM", MappingProxyType(_LLAMA | {"attention_bias": False, "mlp_bias": False})),
        "transformer": RepositoryClass(
            "TransformerForCausalLM",
            MappingProxyType(
                _FLA
                | {
                    "elementwise_affine": True,
                    "num_heads": 32,
                    "num_hidden_layers": 24,
                    "num_kv_heads": None,
                    "qk_norm": False,
                    "qkv_bias": False,
                    "rope_theta": 10000.0,
                    "window_size": None,
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
