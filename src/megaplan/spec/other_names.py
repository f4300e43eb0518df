"""Names that other tools give to keys of a spec, and words that they give to values, for hints.

A key with a dot is absolute; a key without one belongs to the section in which the name occurs, or to any section that has it.
"""

from collections.abc import Mapping
from typing import Any

_SAME: tuple[tuple[tuple[str, ...], str], ...] = (
    (("mesh.tp",), "tp tensor_parallel tensor_parallelism tp_size tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size"),
    (("mesh.pp",), "pp pipeline pipeline_parallel pp_size pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size"),
    (("mesh.cp",), "cp context_parallel context_parallelism cp_size context_parallel_size context_parallel_degree"),
    (("mesh.ep",), "ep expert_parallel expert_parallelism ep_size expert_parallel_size expert_model_parallel_size"),
    (("mesh.etp",), "etp expert_tensor_parallel expert_tensor_parallel_size expert_tensor_parallel_degree"),
    (("mesh.vpp",), "vpp virtual_pipeline vp vp_size interleave virtual_pipeline_model_parallel_size num_virtual_stages"),
    (("dp_shard", "dp_replicate"), "dp data_parallel data_parallel_size dp_size"),
    (("mesh.dp_shard",), "fsdp fsdp_size data_parallel_shard_degree"),
    (("mesh.dp_replicate",), "data_parallel_replicate_degree hsdp"),
    (("model.hidden_size",), "d_model n_embd n_embed model.dim model_dim embedding_dim embed_dim"),
    (("model.num_layers",), "n_layers n_layer layers num_hidden_layers"),
    (("model.vocab_size",), "n_vocab vocab padded_vocab_size"),
    (("model.tie_embeddings",), "tied tied_embeddings tie_word_embeddings"),
    (("model.norm_eps",), "rms_norm_eps layer_norm_eps layernorm_epsilon layer_norm_epsilon norm_epsilon"),
    (("state_dim",), "d_state ssm_state_size mamba_state_dim"),
    (("num_heads",), "num_attention_heads n_heads n_head"),
    (("num_kv_heads",), "num_key_value_heads n_kv_heads num_query_groups"),
    (("model.attention.window_size",), "sliding_window window"),
    (("ffn_hidden_size",), "intermediate_size ffn_dim d_ff n_inner ffn_size"),
    (("model.moe.ffn_hidden_size",), "moe_intermediate_size moe_ffn_hidden_size expert_hidden_size"),
    (("model.moe.shared_ffn_hidden_size",), "moe_shared_expert_intermediate_size shared_expert_intermediate_size"),
    (("model.moe.num_experts",), "num_local_experts n_routed_experts moe_num_experts experts"),
    (("model.moe.top_k",), "num_experts_per_tok num_experts_per_token experts_per_token moe_router_topk moe_top_k"),
    (("batch.seq_length",), "seq seq_len sequence_length max_length max_seq_len context_length block_size max_position_embeddings"),
    (
        ("batch.micro_batch_size",),
        "micro_batch mbs batch_size microbatch_size local_batch_size micro_batch_size_per_gpu train_micro_batch_size_per_gpu "
        "per_device_train_batch_size",
    ),
    (
        ("schedule.num_microbatches", "schedule.steps_per_update"),
        "gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps",
    ),
    (("schedule.num_microbatches",), "microbatches num_micro_batches micro_batches"),
    (("schedule.kind",), "schedule.name schedule.type pipeline_schedule pipeline_parallel_schedule"),
    (("optimizer.matrix",), "optimizer.name optimizer.type"),
    (("training.learning_rate",), "lr max_lr base_lr"),
    (("training.steps",), "train_iters max_steps num_steps iterations train_steps total_steps"),
    (("training.weight_decay",), "wd"),
    (("training.gradient_clip",), "clip_grad grad_clip max_norm max_grad_norm gradient_clipping gradient_clip_val"),
    (("training.rate_schedule",), "lr_scheduler lr_decay_style scheduler"),
    (("precision.params",), "precision.dtype precision.compute model.dtype param_dtype params_dtype torch_dtype compute_dtype"),
    (("precision.reduce",), "reduce_dtype grad_reduce_dtype reduce_in"),
    (("precision.grads",), "grad_dtype gradient_dtype main_grads_dtype"),
    (("precision.master",), "master_dtype master_weights main_params_dtype"),
    (("precision.moments",), "exp_avg_dtype optimizer_dtype state_dtype"),
    (("precision.recipe",), "fp8 fp8_recipe float8 quantization"),
    (
        ("recompute.default",),
        "recompute.granularity recompute_granularity activation_checkpointing activation_checkpoint gradient_checkpointing checkpointing "
        "remat",
    ),
    (("sharding.reshard_after_forward",), "zero zero_stage stage sharding.level reshard"),
    (("host.name",), "framework backend engine launcher trainer"),
    (("host.attention_backend",), "flash_attention use_flash_attn flash_attn attn_implementation"),
    (("device.per_node",), "gpus_per_node num_gpus_per_node n_gpus_per_node devices_per_node nproc_per_node"),
    (("device.name",), "gpu gpu_type device.type accelerator"),
    (("device.capacity",), "memory memory_gb memory_bytes memory_capacity mem vram hbm gpu_memory"),
    (("lora.rank",), "lora_rank lora_r lora.r"),
    (("lora.alpha",), "lora_alpha"),
    ((), "compile torch_compile"),  # an option of training
)  # fmt: skip
_KEYS = {name: keys for keys, names in _SAME for name in names.split()}
_WORDS: Mapping[str, Mapping[Any, Any]] = {
    "recompute.default": {True: "full", False: "none"},
    "sharding.reshard_after_forward": {3: True, 2: False},
    "precision.recipe": {True: {"name": "fp8_current"}},
    "host.attention_backend": {True: "flash", "flash_attention_2": "flash"},
}
"""Values of a key in other tools' words; a stage of ZeRO beyond 1 is a choice of resharding."""
GPUS = frozenset({"gpus", "num_gpus", "n_gpus", "world_size", "devices", "num_devices", "nproc", "ranks", "count"})
GLOBAL_BATCH = frozenset({"global_batch_size", "global_batch", "gbs", "train_batch_size"})
"""Names of quantities that a spec has as products of keys: the GPUs of the job, and the sequences of one optimizer step."""
_FACTORS = (("batch", "micro_batch_size"), ("mesh", "dp_replicate"), ("mesh", "dp_shard"), ("schedule", "steps_per_update"))
"""Factors of the global batch other than the number of microbatches; each is 1 if not given."""
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}


def keys_named(section: str, name: str) -> tuple[str, ...] | None:
    """Keys that other tools call by a name which occurs in a section; None for a name that no known tool uses.

    Args:
        section: Dotted section, empty for the top level.
        name: The name in lower case, with underscores.
    """
    return _KEYS.get(f"{section}.{name}" if section else name, _KEYS.get(name))


def value_named(key: str, value: Any) -> Any:
    """The value of a dotted key for another tool's word; any other value unchanged."""
    words = _WORDS.get(key, {})
    found = next((meant for word, meant in words.items() if type(word) is type(value) and word == value), value)
    return DTYPES.get(found.lower(), found) if isinstance(found, str) and key.startswith("precision.") else found


def microbatches_of(document: Mapping[str, Any], global_batch: int) -> tuple[int, ...]:
    """The number of microbatches with which a spec's document has a global batch; empty if its other factors do not divide the batch."""
    rest = 1
    for section, key in _FACTORS:
        given = document.get(section)
        value = given.get(key, 1) if isinstance(given, Mapping) else 1
        rest *= value if isinstance(value, int) and value > 0 else 1
    return (global_batch // rest,) if global_batch > 0 and global_batch % rest == 0 else ()
