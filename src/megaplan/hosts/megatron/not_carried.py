"""Launch arguments of Megatron-LM that a spec does not need: told as not carried, or ignored."""

from __future__ import annotations

from megaplan.hosts.megatron.argument import told

_ROUTER = "experts are chosen otherwise than by megarun's router; shapes are the same"
_ROTARY = "rotary angles are turned otherwise; shapes are the same"
NOT_CARRIED = (
    *told(
        "moe_router_score_function moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor "
        "moe_router_enable_expert_bias moe_router_bias_update_rate moe_input_jitter_eps",
        _ROUTER,
    ),
    *told("moe_router_dtype", "routing probabilities are taken as 16-bit ones, of which the all-gather dispatcher keeps one a routed row"),
    *told(
        "rotary_percent rotary_scaling_factor rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor rope_type "
        "mscale mscale_all_dim no_rope_freq",
        _ROTARY,
    ),
    *told("apply_query_key_layer_scaling", "scores are scaled by layer"),
    *told("apply_layernorm_1p", "norm weights are stored less one"),
    *told("first_last_layers_bf16", "of fp8 alone"),
    *told("step_batch_size_schedule", "the batch grows; the spec's is the given one"),
    *told("rampup_batch_size", "the batch grows; the spec's is the last one"),
    *told("use_transformer_engine_op_fuser", "operators are fused; their saved tensors are taken as the unfused ones'"),
)
"""Arguments that change values alone, or too little to be modelled, and what they do."""

IGNORED_PREFIXES = (
    "log_", "tensorboard_", "wandb_", "one_logger_", "timing_", "save", "load", "ckpt_", "eval_", "data_", "dataloader_",
    "tokenizer_", "exit_", "dist_ckpt_", "profile_", "check_", "rerun_", "inference_", "no_load_", "no_save_", "async_",
    "error_injection_", "straggler_", "result_", "nccl_", "distributed_", "train_data_", "valid_data_", "test_data_",
    "per_split_data_", "reset_", "no_ckpt_", "verify_", "barrier_",
)  # fmt: skip
"""Beginnings of names: files, logs, checkpoints, data, and how processes meet."""

IGNORED = frozenset({
    "split", "mock_data", "vocab_file", "merge_file", "num_workers", "no_mmap_bin_files",
    "finetune", "profile", "train_samples", "lr_warmup_samples",
    "lr_decay_samples", "lr_decay_iters", "use_mcore_models", "use_cpu_initialization", "init_method_std",
    "init_method_xavier_uniform", "te_rng_tracker", "use_tp_pp_dp_mapping", "overlap_grad_reduce", "overlap_param_gather",
    "overlap_p2p_communication_warmup_flush", "no_overlap_p2p_communication", "ddp_average_in_collective", "ddp_bucket_size",
    "ddp_num_buckets", "enable_experimental", "manual_gc", "manual_gc_interval",
    "accumulate_allreduce_grads_in_fp32", "no_bias_gelu_fusion", "no_bias_swiglu_fusion", "no_rope_fusion",
    "no_masked_softmax_fusion", "no_bias_dropout_fusion", "no_persist_layer_norm", "moe_router_fusion",
    "local_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "node_rank", "max_restarts",
    "encoder_seq_length", "spec", "is_hybrid_model", "attention_softmax_in_fp32", "muon_momentum",
    "muon_scale_mode", "muon_extra_scale_factor", "muon_tp_mode", "adam_beta1", "adam_beta2", "adam_eps", "decoupled_lr",
    "decoupled_min_lr", "mtp_loss_scaling_factor", "moe_flex_dispatcher_num_sms",
    "moe_enable_deepep", "cuda_graph_warmup_steps", "cuda_graph_modules", "use_legacy_models",
    "export_force_local_attention", "calculate_per_token_loss", "moe_per_layer_logging",
})  # fmt: skip
"""Names that change no tensor of the ledger."""
