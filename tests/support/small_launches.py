"""Small launches of Megatron-Core, as arguments with underscores for dashes."""

from typing import Any

DELTA: dict[str, Any] = {
    **{"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1024, "num_attention_heads": 8, "group_query_attention": True},
    **{"num_query_groups": 2, "kv_channels": 64, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_num_key_heads": 4},
    **{"linear_num_value_heads": 8, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "moe_grouped_gemm": True},
    **{"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_gate": True, "attention_output_gate": True, "qk_layernorm": True},
    **{"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.001, "swiglu": True, "normalization": "RMSNorm"},
    **{"disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "seq_length": 1024},
    **{"max_position_embeddings": 1024, "micro_batch_size": 2, "global_batch_size": 16, "bf16": True, "use_distributed_optimizer": True},
    **{"use_mcore_models": True, "transformer_impl": "transformer_engine", "attention_dropout": 0.0, "hidden_dropout": 0.0},
}
"""Layers of Qwen3-Next, small: three gated delta nets, then gated attention."""
