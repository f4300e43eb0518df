"""Launch arguments of Megatron-LM that a spec does not need: reported as not carried, or ignored."""

from megaplan.hosts.megatron.argument import reported

_ROUTER = "experts are chosen by another rule than megarun's router; shapes are the same"
ROTARY = "rotary angles are computed by another rule; shapes are the same"
NOT_CARRIED = (
    *reported(
        "moe_router_score_function moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor "
        "moe_router_enable_expert_bias moe_router_bias_update_rate moe_input_jitter_eps",
        _ROUTER,
    ),
    *reported(
        "rotary_scaling_factor rope_type mscale mscale_all_dim no_rope_freq",
        ROTARY,
    ),
    *reported("yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow no_yarn_correction_range_round_to_int", ROTARY),
    *reported("use_checkpoint_args use_mp_args_from_checkpoint_args", "arguments of the checkpoint replace those given here"),
    *reported(
        "hierarchical_context_parallel_sizes", "context ranks exchange keys and values in two levels; buffers are counted as for one level"
    ),
    *reported("export_qk_l2_norm export_moe_apply_probs_on_input", "an option of exported checkpoints; tensors are counted as without it"),
    *reported("moe_pad_expert_input_to_capacity", "rows of an expert are padded to its capacity; they are counted without padding"),
    *reported(
        "glu_linear_offset activation_func_clamp_value", "the activation has an offset or a bound; its tensors are counted as without them"
    ),
    *reported("moe_router_padding_for_fp8 moe_router_padding_for_quantization", "rows of an expert are padded to a multiple of 16 or 32"),
    *reported("moe_apply_probs_on_input", "probabilities multiply the experts' input instead of their output"),
    *reported("moe_permute_fusion_into_hybridep", "HybridEP sorts rows by expert; buffers are counted as without that"),
    *reported("moe_dispatch_fwd_dtype moe_combine_bwd_dtype", "rows are sent in another dtype; they are counted in 16 bits"),
    *reported("moe_use_upcycling moe_upcycling_granularity", "experts start from a dense checkpoint"),
    *reported("use_nccl_ub fsdp_manual_registration", "buffers are registered with NCCL; NCCL's memory for them is not counted"),
    *reported("ddp_reduce_scatter_with_fp32_accumulation", "gradients are accumulated in fp32 during the reduction"),
    *reported(
        "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power",
        "learning rates and initial weights depend on the width",
    ),
    *reported("mtp_detach_heads mtp_hsm", "prediction modules are trained in another way; shapes are the same"),
    *reported(
        "fused_residual_rmsnorm use_te_activation_func mla_down_proj_fusion use_grouped_gemm_for_shared_expert "
        "use_grouped_gemm_for_dense_mlp",
        "operators are fused; their saved tensors are counted as those of unfused operators",
    ),
    *reported("disable_mamba_mem_eff_path", "Mamba-2 runs unfused; its saved tensors are counted as those of the fused kernel"),
    *reported("qk_clip", "queries and keys are scaled down if attention scores are too large"),
    *reported("mamba_training_ssm_states_dtype", "states between chunks of Mamba's scan are counted in fp32"),
    *reported("apply_query_key_layer_scaling", "scores are scaled by layer"),
    *reported("apply_layernorm_1p", "norm weights are stored minus one"),
    *reported("step_batch_size_schedule", "the batch grows; the spec has the global batch size, or the last size of the schedule"),
    *reported("rampup_batch_size", "the batch grows; the spec has its last size"),
    *reported("use_transformer_engine_op_fuser", "operators are fused; their saved tensors are counted as those of unfused operators"),
)
"""Arguments whose effect on memory and time is zero or too small to be modelled, with a description of the effect."""

IGNORED_PREFIXES = (
    "log_", "tensorboard_", "wandb_", "one_logger_", "timing_", "save", "load", "ckpt_", "eval_", "data_", "dataloader_", "tokenizer_",
    "exit_", "dist_ckpt_", "profile_", "check_", "rerun_", "inference_", "no_load_", "no_save_", "async_", "error_injection_",
    "straggler_", "result_", "nccl_", "distributed_", "train_data_", "valid_data_", "test_data_", "per_split_data_", "reset_",
    "no_ckpt_", "verify_", "barrier_", "rl_", "grpo_", "langrl_", "fim_", "inprocess_", "otel_", "flight_recorder_", "no_flight_",
    "disable_flight_", "moe_routing_trace_", "dino_", "ict_", "no_dsa_", "disable_dsa_", "gdp_", "mhc_", "ft_",
    "dsa_indexer_rope_", "dsa_indexer_rotate_", "dsa_indexer_k_norm_", "dsa_indexer_scoring_",
    "non_persistent_", "persistent_", "pytorch_profiler_", "indexer_", "retriever_", "vision_", "sharp_", "tiktoken_",
    "null_tokenizer_", "mamba_inference_", "lion_", "logits_save_", "bert_", "biencoder_",
    "kitchen_attention_", "replication", "disable_log_", "disable_ckpt_", "use_checkpoint_opt",
    "override_opt", "megatron_fsdp_enable_", "use_fused_", "tp_comm_overlap_", "tp_comm_bulk_", "tp_comm_split_", "tp_comm_atomic_",
    "tp_comm_bootstrap_", "no_tp_comm_", "disable_tp_comm_", "redirects",
)  # fmt: skip
"""Prefixes of ignored names: files, logs, checkpoints, data, and rendezvous."""

IGNORED = frozenset({
    "activation_offload_fraction", "adam_beta1", "adam_beta2", "adam_eps", "adlr_autoresume", "adlr_autoresume_interval",
    "allow_ambiguous_pad_tokens", "app_tag_run_name", "app_tag_run_version", "apply_residual_connection_post_layernorm",
    "apply_wd_to_qk_layernorm", "attention_softmax_in_fp32", "auto_detect_ckpt_format", "batch_invariant_backend",
    "batch_invariant_mode", "block_data_path", "cache_mla_latents", "calc_ft_timeouts", "calculate_per_token_loss", "chat_template",
    "classes_fraction", "config_logger_dir", "cp_comm_type", "cpu_offloading_retain_pinned_cpu_buffers", "create_all_gather_group",
    "cuda_graph_warmup_steps", "ddp_average_in_collective", "ddp_bucket_size",
    "ddp_num_buckets", "ddp_pad_buckets_for_high_nccl_busbw", "decode_only_cuda_graphs", "decoder_seq_length", "decoupled_lr",
    "decoupled_min_lr", "decrease_batch_size_if_needed", "delay_offload_until_cuda_graph", "delta_offload_bytes_across_pp_ranks",
    "disable_align_grad_reduce", "disable_bf16_reduced_precision_matmul", "disable_clone_scatter_output_in_embedding",
    "disable_fp8_wgrad", "disable_gloo_process_groups", "disable_jit_fuser", "disable_manual_gc_eval", "disable_msc",
    "disable_save_tokenizer_assets", "disable_straggler_on_startup", "disable_strict_fsdp_dtensor_load",
    "disable_symmetric_registration", "disable_tokenizer_sentencepiece_ignore_extra_whitespaces",
    "disable_use_tokenizer_model_from_checkpoint_args", "distrib_optim_fully_reshardable_mem_efficient",
    "dump_param_to_param_group_map", "embedding_init_method_std", "embedding_path", "empty_unused_memory_level",
    "enable_chunked_prefill", "enable_cuda_graph_capture", "enable_experimental", "enable_ft_package", "enable_msc",
    "encoder_seq_length", "end_weight_decay", "eod_mask_loss", "ep_overlap_early_attn_memory_release", "evidence_data_path",
    "export_default_te_spec", "export_force_local_attention", "export_model_type",
    "export_te_mcore_model", "fake_process_group", "fine_grained_offloading_max_inflight_offloads", "finetune",
    "flash_attention_version", "flash_decode", "fp4_quantizer_factory", "fp8_interval", "fp8_quantizer_factory",
    "full_validation", "gpu_sniff_test_interval", "gtp_expert_remat_nccl_ub",
    "gtp_remat_nccl_ub", "gtp_remat_opt_in_modules", "gtp_remat_reduce_scatter_with_fp32_accumulation", "head_lr_mult",
    "high_priority_a2a_comm_stream", "high_priority_stream_groups",
    "hysteresis", "img_h", "img_w", "init_method_std", "init_method_xavier_uniform", "init_model_with_meta_device",
    "initial_loss_scale", "is_hybrid_model", "iter_per_epoch", "iterations_to_skip", "lazy_mpu_init",
    "local_addr", "local_rank", "logging_level", "logits_load_decode_threads", "logits_load_ignore_errors", "logits_load_kd_loss_alpha",
    "logits_load_msc_prefetch_depth", "logits_load_prefetch_factor", "loss_scale", "loss_scale_window", "lr_decay_iters",
    "lr_decay_samples", "lr_warmup_init", "lr_warmup_samples", "lr_wsd_decay_samples", "manual_gc", "manual_gc_interval", "mask_factor",
    "mask_prob", "mask_type", "master_addr", "master_port", "max_restarts", "max_seqlen_per_dp_cp_rank", "max_tokens_to_oom",
    "memory_snapshot_path", "merge_file",
    "mid_level_dataset_surplus", "min_loss_scale", "min_offloaded_tensor_size", "mlp_chunks_for_prefill", "mmap_bin_files", "mock_data",
    "moe_deepep_num_sms", "moe_enable_deepep", "moe_enable_routing_replay", "moe_flex_dispatcher_num_sms",
    "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute", "moe_hybridep_num_sms",
    "moe_hybridep_num_sms_preprocessing", "moe_hybridep_pad_uneven_dispatch_inputs", "moe_mlp_glu_interleave_size",
    "moe_ncclep_zero_copy", "moe_pad_experts_for_cuda_graph_inference", "moe_paged_stash_buffer_size_factor_cpu",
    "moe_paged_stash_page_size", "moe_per_layer_logging", "moe_router_force_biased",
    "moe_router_force_load_balancing", "moe_router_fusion", "moe_router_quantile_balancing_ema",
    "moe_shared_expert_glu_interleave_size", "moe_single_grouped_bias", "moe_single_grouped_weight",
    "moe_use_grouped_tensor", "monitor_interval", "mrope_section", "mtp_loss_scaling_factor",
    "multiple_validation_sets", "muon_coefficient_type", "muon_extra_scale_factor", "muon_fp32_matmul_prec", "muon_momentum",
    "muon_nesterov", "muon_no_split_qkv", "muon_scale_mode", "muon_tp_mode", "muon_use_syrk", "no_align_grad_reduce",
    "no_align_param_gather", "no_barrier_with_level_1_timing", "no_bias_dropout_fusion", "no_bias_gelu_fusion", "no_bias_swiglu_fusion",
    "no_check_for_nan_in_loss_and_grad", "no_clone_scatter_output_in_embedding", "no_data_sharding", "no_fp8_wgrad",
    "no_gradient_reduce_div_fusion", "no_initialization", "no_log_loss_scale_to_tensorboard", "no_manual_gc_eval",
    "no_masked_softmax_fusion", "no_mmap_bin_files", "no_one_logger", "no_overlap_p2p_communication", "no_persist_layer_norm",
    "no_pin_cpu_grads", "no_pin_cpu_params", "no_position_embedding", "no_rope_fusion", "no_strict_fsdp_dtensor_load",
    "no_tokenizer_sentencepiece_ignore_extra_whitespaces", "no_use_tokenizer_model_from_checkpoint_args", "no_weight_decay_cond_type",
    "node_rank", "num_channels", "num_classes", "num_dataset_builder_threads",
    "num_speculative_tokens", "num_workers", "nvtx_ranges", "object_storage_cache_path", "onnx_safe",
    "output_bert_embeddings", "overlap_cpu_optimizer_d2h_h2d",
    "overlap_dispatch_backward_with_experts_wgrad", "overlap_p2p_comm_warmup_flush",
    "overlap_p2p_communication_warmup_flush", "overlap_param_gather_with_optimizer_step",
    "override_ckpt_iteration", "patch_dim", "per_dataset_sequences_path", "perform_initialization", "phase_transition_iterations",
    "pipeline_model_parallel_comm_backend", "pretrained_checkpoint", "profile", "qk_clip_alpha", "qk_clip_threshold",
    "query_in_block_prob", "rdzv_backend", "rdzv_conf", "rdzv_endpoint", "rdzv_id", "record_memory_history", "record_shapes",
    "refit_method", "relative_attention_max_distance", "relative_attention_num_buckets", "reuse_grad_buf_for_mxfp8_param_ag",
    "role", "rotary_interleaved",
    "run_workload_inspector_server", "sample_rate", "sft", "sft_tokenizer_prompt_format", "sgd_momentum", "short_seq_prob",
    "skip_train", "spec", "split", "start_eval_at_iter", "start_method", "start_weight_decay", "swin_backbone_type",
    "symmetric_ar_type", "te_rng_tracker", "test_mode", "titles_data_path", "torch_fsdp2_no_reshard_after_forward", "train_samples",
    "train_sync_interval", "trust_remote_code", "use_cpu_initialization", "use_dist_ckpt", "use_flashinfer_fused_rope", "use_gigatoken",
    "use_legacy_models", "use_legacy_static_engine", "use_mcore_models", "use_one_sent_docs", "use_persistent_ckpt_worker",
    "use_pytorch_profiler", "use_ring_exchange_p2p", "use_same_sampling_seed_across_dp_ranks", "use_sharp",
    "use_torch_optimizer_for_cpu_offload", "use_tp_pp_dp_mapping", "validation_set_names", "vocab_file", "weight_decay_incr_style",
    "yarn_correction_range_round_to_int",
})  # fmt: skip
"""Names that change no tensor of the ledger."""
