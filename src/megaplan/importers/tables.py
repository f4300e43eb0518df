"""Fields that no family reads: irrelevant, not carried, or accepted at one value only.

A field that a family's own import reads is never listed here; a field in no table is refused.
"""

from typing import Any

_TOKENIZER = "tokenizer"
_GENERATION = "generation"
_OUTPUT = "what a call returns or keeps"
_ORIGIN = "where the config comes from"
_START = "initial values; training starts from the spec's own, or from a checkpoint"
_LOSS = "weight of an auxiliary loss"
_KERNEL = "choice of a kernel"
_LIMIT = "length the positions were trained to; rows of tokens are the spec's batch"
_STORED = "how the published weights are stored; the spec's precision says what is trained"

IGNORED: dict[str, str] = {
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "eod_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "tokenizer_class"), _TOKENIZER
    ),
    **dict.fromkeys(
        ("num_logits_to_keep", "use_cache", "max_length", "do_sample", "temperature", "top_p", "cache_implementation"), _GENERATION
    ),
    **dict.fromkeys(("output_router_logits", "output_attentions", "output_hidden_states", "return_dict"), _OUTPUT),
    **dict.fromkeys(
        ("_name_or_path", "architectures", "auto_map", "transformers_version", "_commit_hash", "id2label", "label2id"), _ORIGIN
    ),
    **dict.fromkeys(("initializer_range", "initializer_factor", "rescale_prenorm_residual", "init_method"), _START),
    **dict.fromkeys(
        (
            "time_step_min",
            "time_step_max",
            "time_step_floor",
            "time_step_rank",
            "time_step_init_scheme",
            "A_initializer_range",
            "mtp_layers_block_type",
            "mtp_hybrid_override_pattern",
        ),
        _START,
    ),
    **dict.fromkeys(
        ("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_z_loss_coef", "mtp_loss_scaling_factor", "moe_shared_expert_overlap"),
        _LOSS,
    ),
    **dict.fromkeys(
        ("_attn_implementation", "use_mamba_kernels", "attn_implementation", "pretraining_tp", "ep_size", "rope_interleave"), _KERNEL
    ),
    **dict.fromkeys(("max_position_embeddings", "max_sequence_length", "model_max_length"), _LIMIT),
    **dict.fromkeys(("torch_dtype", "dtype", "quantization_config", "mamba_ssm_cache_dtype", "mamba_ssm_dtype"), _STORED),
}
"""Fields that change neither a tensor nor a layer's computation, and the reason."""

_SCALE = "a factor on values that megarun does not apply"
_ROUTING = "experts are chosen otherwise than by megarun's router; shapes are the same"
_DROPOUT = "dropout, which megarun does not have: no mask is counted"
_PREDICTION = "transformers builds no prediction module, so none is counted"

NOT_CARRIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "embedding_multiplier": ((1, 1.0, None), _SCALE),
    "residual_multiplier": ((1, 1.0, None), _SCALE),
    "logits_scaling": ((1, 1.0, None), _SCALE),
    "logit_scale": ((1, 1.0, None), _SCALE),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout", "residual_dropout"), ((0.0, 0, None), _DROPOUT)
    ),
    **dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "embedding_dropout", "resid_dropout", "embed_dropout"), ((0.0, 0, None), _DROPOUT)
    ),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "num_mtp_layers"), ((0, None), _PREDICTION)),
    **dict.fromkeys(
        ("use_bidirectional_attention",), ((False, None, "vision"), "tokens attend to later tokens, but the core is counted as causal")
    ),
    "clip_qkv": ((None,), "queries, keys and values are clamped; shapes are the same"),
    "mamba_norm_before_gate": ((True, False, None), "the original applies the gate after the norm; shapes are the same"),
    "routed_scaling_factor": ((1, 1.0, None), _SCALE),
    "topk_method": (("greedy", None), f"{_ROUTING}; a correction bias of the experts is a buffer and no parameter"),
    "scoring_func": (("softmax", None), _ROUTING),
    "n_group": ((1, None), _ROUTING),
    "topk_group": ((1, None), _ROUTING),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), ((0, 0.0, None), _ROUTING)),
    "residual_in_fp32": ((False,), "the residual stream is fp32 in the original; here its dtype is precision.params"),
    "norm_before_gate": ((False, None), "the original applies the gate after the norm; shapes are the same"),
}
"""Fields that change only values: their neutral values, and the warning for any other."""

MUST_BE: dict[str, tuple[tuple[Any, ...], str]] = {
    "sliding_window": ((None,), "this family's layers see all positions before them"),
    "is_encoder_decoder": ((False,), "a spec is one stack"),
    "add_cross_attention": ((False,), "a spec is one stack"),
}
"""Fields that a spec can express only at these values (the first is recommended), and the reason; absent means such a value."""
