"""The keys of torchtitan's job configuration: defaults, keys that are read, that change no tensor, and that stop an import.

Source: torchtitan/config/job_config.py at 9810191b^, the last version with TOML files; config_manager.py at e7c0cae9 (June 2025) and at
9dec370a (December 2024) for the keys that older files have in other sections.
"""

from enum import Enum
from typing import Any


class Age(Enum):
    """Version of torchtitan that wrote a file, from its keys; versions run differently."""

    TOML_2024 = "of December 2024"
    TOML_2025 = "of June 2025"
    CURRENT = "of 2026"


DEFAULTS: dict[str, Any] = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.n_layers": None,
    "model.converters": [],
    "optimizer.name": "AdamW",
    "optimizer.lr": 8e-4,
    "optimizer.weight_decay": 0.1,
    "optimizer.implementation": "fused",
    "lr_scheduler.warmup_steps": 200,
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10000,
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "training.mixed_precision_reduce": "float32",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_async_tensor_parallel": False,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.module_fqns_per_model_part": None,
    "parallelism.pipeline_parallel_split_points": [],
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "parallelism.pipeline_parallel_microbatches": None,
    "optimizer.early_step_in_backward": False,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "compile.enable": False,
    "compile.components": ["model", "loss"],
    "model.attn_backend": "sdpa",
    "model.norm_type": "rmsnorm",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": False,
    "quantize.linear.float8.recipe_name": None,
    "quantize.linear.float8.filter_fqns": [],
}
"""Keys that an estimate reads, with torchtitan's own defaults."""

MOVED = {
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.compile": "compile.enable",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    **{f"training.{name}": f"parallelism.{name}" for name in (
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree", "disable_loss_parallel",
    )},
    **{f"experimental.{name}": f"parallelism.{name}" for name in (
        "enable_async_tensor_parallel", "pipeline_parallel_degree", "pipeline_parallel_split_points", "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatches", "context_parallel_degree", "context_parallel_rotate_method",
        "enable_compiled_autograd",
    )},
    **{f"{section}.{name}": f"quantize.linear.float8.{name}" for section in ("float8", "quantize.dense.float8") for name in (
        "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "recipe_name", "filter_fqns", "emulate",
        "force_recompute_fp8_weight_in_bwd",
    )},
}  # fmt: skip
"""Keys of older files by their current names."""
OF_2024 = frozenset(
    {"training.data_parallel_degree", "training.batch_size"}
    | {"experimental.pipeline_parallel_microbatches", "float8.enable_float8_linear", "optimizer.fused"}
)
"""Keys that only versions of 2024 have."""
OF_2025 = frozenset({"training.compile"}) | frozenset(key for key in MOVED if key.startswith("float8."))
"""Keys that were removed in 2025."""

ONE_RANK = {
    Age.TOML_2024: "without FSDP2 parameters and products are fp32",
    Age.TOML_2025: "without FSDP2 products are in fp32, on one GPU in the dtype of autocast",
    Age.CURRENT: "without FSDP2 products are fp32, or those of autocast on one GPU",
}
"""Products of versions that read TOML where `dp_shard · cp` is 1.

Later configurations, in Python or JSON, shard over one rank: 16-bit copies.
Source: `parallelize_llama` of torchtitan at 95677cb9 and 9810191b^, `maybe_enable_amp` (0b44d4c4), which 00b7f569 removed.
"""

REFUSED: dict[str, tuple[Any, str]] = {
    "training.enable_cpu_offload": (False, "parameters and state in the host's memory are not priced"),
    "parallelism.disable_loss_parallel": (False, "full logits on every tensor-parallel rank are not priced"),
    "optimizer.param_groups": (None, "parameter groups with separate optimizers are not priced"),
    "parallelism.full_dtensor": (False, "its additional memory is not priced"),
    "parallelism.enable_fsdp_symm_mem": (False, "symmetric memory is outside torch's allocator and not priced"),
    "model.num_mtp_layers": (0, "prediction depths have no counterpart in host torchtitan"),
    "optimizer.optimizers": (None, "groups of parameters with their own optimizers are not priced"),
    "parallelism.enable_sequence_parallel": (True, "tensor parallelism without sequence parallelism is not priced"),
    "parallelism.enable_compiled_autograd": (False, "compiled autograd keeps other tensors"),
    "parallelism.pipeline_parallel_schedule_csv": ("", "a custom schedule is not read"),
    "fault_tolerance.enable": (False, "replicas of torchft are not priced"),
    "float8.scaling_type_input": ("dynamic", "delayed scaling is not priced"),
    "float8.scaling_type_weight": ("dynamic", "delayed scaling is not priced"),
    "float8.scaling_type_grad_output": ("dynamic", "delayed scaling is not priced"),
    "quantize.linear.float8.emulate": (False, "emulated float8 makes other copies"),
    "checkpoint.create_seed_checkpoint": (False, "it trains nothing"),
    "memory_estimation.enable": (False, "it trains nothing"),
    "memory_estimation.enabled": (False, "it trains nothing"),
}
"""Keys with the only value at which an import continues, and the reason."""
IGNORED = frozenset({
    "training.disable_cuda_graphs", "model.moe_comm_backend", "model.non_blocking_capacity_factor",
    "model.use_flex_attn", "model.attn_mask_type", "model.tp_gemm_backend",
    "model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion", "optimizer.beta1", "optimizer.beta2",
    "optimizer.eps", "training.dataset", "training.dataset_path", "training.gc_freq", "training.gc_debug", "training.seed",
    "training.deterministic", "parallelism.context_parallel_load_balancer", "parallelism.context_parallel_rotate_method",
    "parallelism.pipeline_parallel_expert_parallel_overlap", "parallelism.expert_parallel_comm_backend",
    "compile.backend", "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    "quantize.linear.float8.force_recompute_fp8_weight_in_bwd", "quantize.grouped_mm.float8.fqns",
    "quantize.grouped_mm.mx.fqns", "quantize.grouped_mm.mx.recipe_name",
})  # fmt: skip
"""Keys that change no tensor of a step."""
IGNORED_SECTIONS = (
    "job.", "profiling.", "metrics.", "lr_scheduler.", "checkpoint.", "comm.", "debug.", "validation.", "fault_tolerance.",
    "activation_checkpoint.", "training.dataloader.", "quantize.linear.mx.", "experimental.custom_", "memory_estimation.",
)  # fmt: skip
"""Sections whose other keys change no tensor."""
