"""Words of the section `host`: modules, frameworks and policies that its keys name."""

from typing import Literal

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe"]
GraphModule = Literal["attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess"]
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"]
Unpriced = Literal["distillation", "fsdp", "optimizer_cuda_graph"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
FrameworkName = Literal["megatron-lm", "megatron-bridge", "nemo", "mlperf", "gpt-neox"]
OptimizerRecipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
RematPolicy = Literal[
    "minimal_with_context", "minimal", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi", "save_dot_except_mlp", "save_qkv_proj",
    "save_out_proj", "qkv_proj_offloaded", "minimal_offloaded", "custom",
]  # fmt: skip
RematTensor = Literal[
    "decoder_layer_input", "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "query_proj",
    "key_proj", "value_proj", "kv_proj", "qkv_proj", "out_proj", "query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv", "attention_out",
]  # fmt: skip
