"""Rows of the table that describe the model.

Source: `megatron/training/arguments.py` and the config classes that its parser is made from, at d98e8a64.
"""

from typing import Any

from megaplan.hosts.megatron.argument import (
    ABSENT_IS_ZERO,
    GIVEN_DISPATCHER,
    JOINT,
    NEGATED,
    REQUIRED,
    WHOLE,
    Argument,
    Conversion,
    Kind,
    count,
    number,
    switch,
    text,
    words_of,
)


def _at_end(key: str) -> dict[str, Any]:
    return {"key": key, "conversion": JOINT, "touches": "stages", "note": "where stages begin, in a GPT model without a layout"}


_ALL = "parameters, activations"
_WIDTHS: dict[str, Any] = {"touches": _ALL, "block": "mla"}
_DELTA: dict[str, Any] = {"touches": _ALL, "block": "linear_attention"}
_INDEXER: dict[str, Any] = {"touches": _ALL, "block": "indexer"}
_EXPERTS: dict[str, Any] = {"touches": "activations, buffers", "block": "moe"}
_DROPS = Conversion(
    "probs → score", lambda value: "score" if value == "probs" else value, lambda value: value if value != "score" else None
)

LAYERS = (
    text("hybrid_layer_pattern", "model.pattern", None, JOINT, touches=_ALL, note="one symbol per layer, '|' between stages"),
    text("hybrid_override_pattern", "model.pattern", None, JOINT, touches=_ALL, note="older name of --hybrid-layer-pattern; not written"),
    number(
        "hybrid_attention_ratio", "model.pattern", None, JOINT, touches=_ALL, note="older form of the pattern, spread evenly; not written"
    ),
    number("hybrid_mlp_ratio", "model.pattern", None, JOINT, touches=_ALL, note="older form of the pattern, spread evenly; not written"),
    count("num_layers", "model.num_layers", REQUIRED, JOINT, touches=_ALL, note="of a GPT model; a layer is an A and a D or E"),
    text("moe_layer_freq", "model.pattern", 1, JOINT, touches=_ALL, note="the layers of a GPT model that have experts"),
    text("pipeline_model_parallel_layout", "split.spans", None, JOINT, touches="stages", note="stages of a GPT model"),
    *(count(name, **_at_end("split.spans")) for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")),
    *(switch(f"account_for_{end}_in_pipeline_split", **_at_end("split.spans")) for end in ("embedding", "loss")),
    *(count(name, **_at_end("mesh.vpp")) for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")),
    text(
        "mtp_hybrid_override_pattern", "model.features.mtp", None, JOINT, touches=_ALL, note="a module's layers, where the pattern has none"
    ),
    Argument(
        "mtp_num_layers",
        Kind.WHOLE,
        "model.features.mtp.depth",
        None,
        JOINT,
        touches=_ALL,
        note="prediction modules; a pattern has them after '/'",
    ),
)
MODEL = (
    count("hidden_size", "model.hidden_size", REQUIRED, touches=_ALL),
    count("vocab_size", "model.vocab_size", REQUIRED, JOINT, touches=_ALL, note="padded to a multiple of --make-vocab-size-divisible-by"),
    count("make_vocab_size_divisible_by", "model.vocab_size", 128, JOINT, touches=_ALL, note="times tp; the padded size is the key"),
    count("padded_vocab_size", "model.vocab_size", None, JOINT, touches=_ALL, note="replaces --vocab-size and its multiple; not written"),
    switch("no_pad_vocab_size", "model.vocab_size", JOINT, touches=_ALL, dest="pad_vocab_size", note="the vocabulary is not padded"),
    text("tokenizer_type", "model.vocab_size", None, JOINT, touches=_ALL, note="without --vocab-size, of a tokenizer whose size is known"),
    text("tokenizer_model", "model.vocab_size", None, JOINT, touches=_ALL, note="as --tokenizer-type"),
    switch("untie_embeddings_and_output_weights", "model.tie_embeddings", NEGATED, touches="parameters"),
    Argument(
        "normalization",
        Kind.WORD,
        "model.norm",
        "LayerNorm",
        words_of({"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
        words=("LayerNorm", "RMSNorm"),
        touches=_ALL,
    ),
    number("norm_epsilon", "model.norm_eps", 1e-5),
    switch(
        "disable_bias_linear",
        "model.mlp.bias",
        JOINT,
        touches="parameters",
        dest="add_bias_linear",
        note="off: biases of attention, MLPs and experts",
    ),
    switch("swiglu", "model.mlp.activation", JOINT, touches=_ALL, note="swiglu of all MLPs and experts"),
    switch("quick_geglu", "model.mlp.activation", JOINT, touches=_ALL, note="read as swiglu, whose tensors it has; not written"),
    switch("squared_relu", "model.mlp.activation", JOINT, touches="activations", note="relu2; neither is gelu"),
    count("ffn_hidden_size", "model.mlp.ffn_hidden_size", None, JOINT, touches=_ALL, note="absent: 4 hidden sizes, 8/3 with --swiglu"),
    text(
        "position_embedding_type",
        "model.learned_positions",
        "learned_absolute",
        JOINT,
        touches="parameters, activations",
        note="learned_absolute, rope, yarn or none",
    ),
    switch("use_rotary_position_embeddings", "model.learned_positions", JOINT, note="older way to say rope; not written"),
    count(
        "max_position_embeddings",
        "model.learned_positions",
        None,
        JOINT,
        touches="parameters",
        note="of learned positions; otherwise written as the sequence length",
    ),
    number("rotary_percent", "model.attention.rotary_dim", 1.0, JOINT, touches="buffers", note="of the head's width"),
    count("num_attention_heads", "model.attention.num_heads", REQUIRED, JOINT, touches=_ALL, note="1 without attention"),
    number("rotary_base", "model.attention.rope_theta", 10_000.0, WHOLE),
    switch("use_rope_scaling", "model.attention.rope_scaling", JOINT, note="llama3, with 1 and 4 rotations in 8,192 tokens"),
    number("rope_scaling_factor", "model.attention.rope_scaling", 8.0, JOINT, note="with --use-rope-scaling"),
    number("rotary_seq_len_interpolation_factor", "model.attention.rope_scaling", None, JOINT, note="linear"),
    switch("group_query_attention", "model.attention.num_kv_heads", JOINT, touches=_ALL, note="off: as many groups as heads"),
    count("num_query_groups", "model.attention.num_kv_heads", 1, JOINT, touches=_ALL, note="with --group-query-attention"),
    count("kv_channels", "model.attention.head_dim", None, JOINT, touches=_ALL, note="absent: hidden size / heads"),
    switch("qk_layernorm", "model.attention.qk_norm", JOINT, touches=_ALL, note="of latent attention model.attention.latent_norm"),
    switch("add_qkv_bias", "model.attention.bias", JOINT, touches=_ALL, note="on where linears have biases"),
    Argument(
        "softmax_type",
        Kind.WORD,
        "model.attention.sinks",
        "vanilla",
        JOINT,
        words=("vanilla", "learnable"),
        touches="parameters",
        note="learnable: sinks",
    ),
    text("window_size", "model.attention.window_size", None, JOINT, touches="time", note="positions before a token and 0 after it"),
    text("window_attn_skip_freq", "model.attention.full_layers", None, JOINT, touches="time", note="layers without the window"),
    switch("multi_latent_attention", "model.attention.kind", JOINT, touches=_ALL, note="kind: mla; a pattern has + for it"),
    count("q_lora_rank", "model.attention.q_lora_rank", None, **_WIDTHS),
    count("kv_lora_rank", "model.attention.kv_lora_rank", 32, **_WIDTHS),
    count("qk_head_dim", "model.attention.qk_nope_head_dim", 128, **_WIDTHS),
    count("qk_pos_emb_head_dim", "model.attention.qk_rope_head_dim", 64, **_WIDTHS),
    count("v_head_dim", "model.attention.v_head_dim", 128, **_WIDTHS),
    switch("attention_output_gate", "model.attention.gate", JOINT, touches=_ALL),
    Argument(
        "experimental_attention_variant",
        Kind.WORD,
        "model.linear_attention",
        None,
        JOINT,
        words=("gated_delta_net", "dsa"),
        touches=_ALL,
        note="gated_delta_net: of the layers that --linear-attention-freq names; dsa: model.attention.indexer",
    ),
    count("dsa_indexer_n_heads", "model.attention.indexer.num_heads", None, **_INDEXER),
    count("dsa_indexer_head_dim", "model.attention.indexer.head_dim", None, **_INDEXER),
    count("dsa_indexer_topk", "model.attention.indexer.top_k", None, **_INDEXER),
    count("dsa_indexer_topk_freq", "model.attention.indexer.layers", 1, JOINT, note="every n-th layer chooses", **_INDEXER),
    number("dsa_indexer_skip_topk_offset", "model.attention.indexer.layers", 0, JOINT, note="layers that all choose", **_INDEXER),
    number("dsa_indexer_loss_coeff", "model.attention.indexer.loss_coefficient", None, block="indexer"),
    switch(
        "dsa_indexer_use_sparse_loss",
        "model.attention.indexer",
        JOINT,
        note="the loss of the chosen keys; other losses are not priced",
        **_INDEXER,
    ),
    Argument(
        "dsa_kernel_backend",
        Kind.WORD,
        "model.attention.indexer",
        "none",
        JOINT,
        words=("none", "tilelang", "cudnn"),
        note="cudnn; others are not priced",
        **_INDEXER,
    ),
    text("linear_attention_freq", "model.pattern", None, JOINT, touches=_ALL, note="every n-th layer has attention, or one flag per layer"),
    count("linear_num_key_heads", "model.linear_attention.num_key_heads", 16, **_DELTA),
    count("linear_num_value_heads", "model.linear_attention.num_value_heads", 32, **_DELTA),
    count("linear_key_head_dim", "model.linear_attention.key_dim", 128, **_DELTA),
    count("linear_value_head_dim", "model.linear_attention.value_dim", 128, **_DELTA),
    count("linear_conv_kernel_dim", "model.linear_attention.conv_kernel", 4, **_DELTA),
    count("mamba_num_heads", "model.mamba.num_heads", None, JOINT, touches=_ALL, note="absent: 2 hidden sizes / head dimension"),
    count("mamba_head_dim", "model.mamba.head_dim", 64, touches=_ALL),
    count("mamba_state_dim", "model.mamba.state_dim", 128, touches=_ALL),
    count("mamba_num_groups", "model.mamba.num_groups", 8, touches=_ALL),
)
MOE = (
    count("num_experts", "model.moe.num_experts", REQUIRED, touches="parameters, buffers"),
    count("moe_router_topk", "model.moe.top_k", 2, touches="activations, buffers"),
    count("moe_ffn_hidden_size", "model.moe.ffn_hidden_size", None, JOINT, touches=_ALL, note="absent: --ffn-hidden-size"),
    count("moe_shared_expert_intermediate_size", "model.moe.shared_ffn_hidden_size", None, ABSENT_IS_ZERO, touches=_ALL),
    switch("moe_shared_expert_gate", "model.moe.shared_gate", JOINT, touches="parameters, activations"),
    count("moe_latent_size", "model.moe.latent_size", touches=_ALL, note="width of the experts' rows", block="moe"),
    switch("moe_router_pre_softmax", "model.moe.normalize_top_k", NEGATED, block="moe"),
    text("moe_router_load_balancing_type", "host.moe_load_balancing", "aux_loss", JOINT, note="one kind", block="moe"),
    text("moe_aux_loss_coeff", "model.moe.balance_loss_coefficient", 0.0, JOINT, note="one number", block="moe"),
    Argument("moe_router_dtype", Kind.WORD, "host.moe_router_dtype", None, words=("fp32", "fp64"), touches="activations", block="moe"),
    number("moe_z_loss_coeff", "model.moe.z_loss_coefficient", 0.0, ABSENT_IS_ZERO),
    number("moe_expert_capacity_factor", "model.moe.capacity_factor", touches="activations, buffers"),
    Argument("moe_token_drop_policy", Kind.WORD, "model.moe.capacity_drop", "probs", _DROPS, words=("probs", "position"), block="moe"),
    Argument(
        "moe_token_dispatcher_type",
        Kind.WORD,
        "host.moe_dispatcher",
        "allgather",
        GIVEN_DISPATCHER,
        words=("allgather", "alltoall", "flex"),
        **_EXPERTS,
    ),
    Argument(
        "moe_flex_dispatcher_backend",
        Kind.WORD,
        "host.moe_flex_backend",
        "deepep",
        JOINT,
        words=("deepep", "hybridep"),
        note="under flex",
        **_EXPERTS,
    ),
    switch("moe_grouped_gemm", "host.moe_grouped_gemm", **_EXPERTS),
    switch("moe_permute_fusion", "host.moe_permute_fusion", **_EXPERTS),
    switch("overlap_moe_expert_parallel_comm", "host.moe_overlap", **_EXPERTS),
    switch("moe_shared_expert_overlap", "host.moe_shared_overlap", **_EXPERTS),
    switch("use_fused_weighted_squared_relu", "host.fused_squared_relu", **_EXPERTS),
)
