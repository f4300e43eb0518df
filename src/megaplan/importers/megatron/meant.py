"""Arguments of other programs and of earlier releases of Megatron-LM, and what they mean in the release that is read."""

import re
from collections.abc import Collection, Iterator
from types import MappingProxyType
from typing import Any

from megaplan.hosts.megatron.argument import flag
from megaplan.importers.megatron.deepspeed import OWN_MODULES, Translated, flash_of_own_modules, translate_deepspeed
from megaplan.importers.megatron.mindspeed import is_of_mindspeed, translate_mindspeed
from megaplan.importers.structure import names_a_tensor

MEANT = MappingProxyType(
    {
        "hidden_dim": "--hidden-size",
        "max_length": "--seq-length",
        **dict.fromkeys(("use_bias", "add_bias_linear"), "--add-qkv-bias"),
        **dict.fromkeys(("attention_head_type",), "--group-query-attention --num-query-groups 1   # for"),
        **dict.fromkeys(("qk_norm",), "--qk-layernorm"),
        **dict.fromkeys(("use_rms_norm",), "--normalization RMSNorm"),
        **dict.fromkeys(("no_tie_embed_logits",), "--untie-embeddings-and-output-weights"),
        **dict.fromkeys(("glu_activation",), "--swiglu   # for"),
        **dict.fromkeys(("mlp_type",), "--moe-shared-expert-intermediate-size   # for"),
        **dict.fromkeys(("zero_stage",), "--use-distributed-optimizer   # for stage 1, not"),
    }
)
"""Names that other programs use, and the argument of Megatron-LM that may have the meaning."""

OLDER: MappingProxyType[str, tuple[str, Any]] = MappingProxyType(
    {
        "fp8_hybrid": ("fp8_format", "hybrid"),
        "fp8_e4m3": ("fp8_format", "e4m3"),
        "checkpoint_activations": ("recompute_granularity", "full"),
        "activations_checkpoint_method": ("recompute_granularity", "full"),
    }
)
"""Switches of earlier releases that decide memory: the argument that took their place, and its value."""

RENAMED = MappingProxyType(
    {
        "model_parallel_size": "tensor_model_parallel_size",
        "batch_size": "micro_batch_size",
        "lora_r": "lora_rank",
        "pad_vocab_size_to": "padded_vocab_size",
        "shared_expert_gate": "moe_shared_expert_gate",
        "use_qk_norm": "qk_layernorm",
        "use_qk_layernorm": "qk_layernorm",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "multi_head_latent_attention": "multi_latent_attention",
        "tokenizer_file": "tokenizer_model",
        "tokenizer_name_or_path": "tokenizer_model",
        "moe_expert_parallel_size": "expert_model_parallel_size",
        "moe_train_capacity_factor": "moe_expert_capacity_factor",
        **dict.fromkeys(("rotary_position_embeddings_theta", "rope_theta", "rotary_emb_base"), "rotary_base"),
        "warmup": "lr_warmup_fraction",
        **dict.fromkeys(("moe_loss_coeff", "moe_loss_weight"), "moe_aux_loss_coeff"),
        "moe_capacity_factor": "moe_expert_capacity_factor",
        "activations_checkpoint_method": "recompute_method",
        "activations_checkpoint_num_layers": "recompute_num_layers",
        "checkpoint_num_layers": "recompute_num_layers",
        "distribute_checkpointed_activations": "distribute_saved_activations",
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_heads_kv"), "num_query_groups"),
        **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer"), "num_layers"),
        **dict.fromkeys(("num_heads", "n_heads", "n_head"), "num_attention_heads"),
        **dict.fromkeys(("d_model", "n_embd", "model_dim"), "hidden_size"),
        **dict.fromkeys(("intermediate_size", "ffn_size", "d_ff", "ffn_dim"), "ffn_hidden_size"),
        **dict.fromkeys(("head_dim", "head_size"), "kv_channels"),
        **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_moe_experts", "n_experts"), "num_experts"),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"), "moe_router_topk"),
        **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), "moe_ffn_hidden_size"),
        **dict.fromkeys(("shared_expert_intermediate_size", "shared_expert_ffn_hidden_size"), "moe_shared_expert_intermediate_size"),
        **dict.fromkeys(("num_nextn_predict_layers", "mtp_depth"), "mtp_num_layers"),
        **dict.fromkeys(("qk_head_size",), "qk_head_dim"),
        **dict.fromkeys(("vocabulary_size", "n_vocab"), "vocab_size"),
        **dict.fromkeys(("max_seq_len", "seq_len", "sequence_length"), "seq_length"),
        **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size"), "tensor_model_parallel_size"),
        **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_size"), "pipeline_model_parallel_size"),
        **dict.fromkeys(("ep", "ep_size", "expert_parallel_size"), "expert_model_parallel_size"),
        **dict.fromkeys(("cp", "cp_size"), "context_parallel_size"),
    }
)
"""Arguments of earlier releases, of forks and of other programs, and the present names of the same values."""
OF_TOKENIZER = re.compile(r"tokenizer(?:_\w+)?_(?:model|path|name|dir|file)$")
"""Names of the arguments by which forks name a tokenizer."""

OLDER_WORDS: MappingProxyType[tuple[str, Any], str] = MappingProxyType(
    {
        ("moe_token_dispatcher_type", "alltoall_seq"): "alltoall",
        ("softmax_type", "off-by-one"): "vanilla",
        ("optimizer", "adamw"): "adam",
        ("optimizer", "fusedadamw"): "adam",
    }
)
"""Words of earlier releases, and their replacements."""

OLDER_IGNORED = frozenset({
    "no_async_tensor_model_parallel_allreduce", "async_tensor_model_parallel_allreduce", "no_query_key_layer_scaling",
    "no_contiguous_buffers_in_local_ddp", "use_contiguous_buffers_in_local_ddp", "ddp_impl", "DDP_impl",
    "no_scatter_gather_tensors_in_pipeline", "scatter_gather_tensors_in_pipeline", "use_cpu_initialization",
    "no_layer_norm_sharding", "fp8_wgrad", "moe_use_legacy_grouped_gemm", "disable_moe_token_dropping", "no_bias_dropout_fusion",
    "deepspeed", "deepspeed_config", "deepspeed_mpi", "deepspeed_activation_checkpointing", "contigious_checkpointing",
    "synchronize_each_layer", "profile_backward", "no_pipeline_parallel", "use_legacy_models",
    "create_moe_param_group", "moe_eval_capacity_factor", "lr_decay_tokens", "lr_warmup_tokens", "train_tokens",
    "use_mcore_models", "delay_grad_reduce", "overlap_param_gather_with_optimizer_step",
    "no_delay_grad_reduce", "use_ring_exchange_p2p", "no_fused_kernels", "no_gradient_reduce_fusion", "timing_log_level",
    "no_save_rng", "no_load_rng", "num_distributed_workers", "moe_token_dropping", "max_tokens_to_oom", "use_unpadded_batch",
    "enable_one_logger", "onelogger_entity", "transformer_timers", "use_tokenizer_from_hf", "attention_softmax_in_fp32",
    "recompute_in_first_chunk", "no_check_for_nan_in_loss", "local_rank", OWN_MODULES,
})  # fmt: skip
"""Arguments of earlier releases that change no tensor of the ledger."""

NOT_PLANNED = MappingProxyType(
    {
        "reuse_fp32_param": "parameters share the storage of their fp32 copies there, and both are counted",
        "swap_optimizer": "the optimizer's state is in host memory there, and is counted on the device",
        "swap_attention": "kept tensors of attention are in host memory there, and are counted on the device",
        "recompute_activation_function": "outputs of activation functions are computed again there, and are counted as kept",
        "recompute_norm": "outputs of norms are computed again there, and are counted as kept",
        "recompute_in_bubble": "other layers are computed again there",
        "recompute_in_advance": "other layers are computed again there",
        "enable_recompute_layers_per_pp_rank": "recomputed layers are of a rank there, and are read as of each of its stages",
        "checkpoint_in_cpu": "checkpoints of recompute are in host memory there, but are counted on the device",
        "split_transformers": "attention and MLP are recomputed separately there, and a layer is recomputed as one here",
        "memory_centric_tiled_linear": "linears run in tiles there, but are counted in one piece",
        "moe_zero_memory": "kept tensors of experts are computed again there, and are counted",
        "o2_optimizer": "the optimizer's averages are bf16 there, and are counted in fp32",
        "output_layer_slice_num": "the head runs in slices there, but is counted in one piece",
        "loss_compute_mode=chunk": "the loss reads logits in chunks there, but they are counted in full",
        **dict.fromkeys(
            ("moe_fb_overlap", "combined_1f1b"),
            "experts exchange rows while another microbatch computes there, but saved tensors of one microbatch are counted",
        ),
        "ai_framework=mindspore": "MindSpore runs it, with other kernels and another allocator than torch",
    }
)
"""Switches of forks, and words of their arguments, that change memory without a counterpart, and what is counted instead."""

HEADS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {"multihead": {}, "multiquery": {"group_query_attention": True, "num_query_groups": 1}}
)
"""Arguments that the types of heads of earlier forks are read as."""


def renamed(values: dict[str, Any], read: set[str], known: Collection[str]) -> Iterator[Translated]:
    """Renames arguments in `values` to their present names, including the forks' names for a tokenizer.

    Args:
        values: Arguments of a launch.
        read: Arguments that need no further reading, to which these are added.
        known: Arguments of the release that is read.
    """
    older = {name: present for name, present in RENAMED.items() if values.get(name) is not None}
    named = (key for key, value in values.items() if key not in known and isinstance(value, str) and OF_TOKENIZER.search(key))
    for key, name in {**dict.fromkeys(named, "tokenizer_model"), **older}.items():
        read.add(key)
        if values.get(name) is None:
            values[name] = values[key]
            yield Translated(name, f"{flag(key)} is of earlier releases or forks, and is read as {flag(name)}")
        elif values[name] != values[key]:
            yield Translated(name, f"{flag(key)} {values[key]} has the meaning of {flag(name)}, whose value is taken", uncertain=True)
        if name == "num_query_groups":
            values.setdefault("group_query_attention", True)


def translate_forks(values: dict[str, Any]) -> list[Translated]:
    """Translates arguments of Megatron-LM's forks: removes them from `values` and adds their equivalents."""
    found: list[Translated] = []
    if (heads := str(values.get("attention_head_type"))) in HEADS:
        values |= HEADS[heads]
        del values["attention_head_type"]
    for key in ("norm_type", "norm_dtype"):
        if letters(values.get(key)) in ("rmsnorm", "layernorm") and values.get("normalization") is None:
            values["normalization"] = values.pop(key)
            found.append(Translated("normalization", f"{flag(key)} {values['normalization']} is read as --normalization"))
    if values.get("glu_activation") == "swiglu":
        values["swiglu"] = bool(values.pop("glu_activation"))
        found.append(Translated("swiglu", "--glu-activation swiglu is read as --swiglu"))
    of_before, own = _of_before_core(values), values.get("transformer_impl")
    if of_before and own is None:
        values["transformer_impl"] = "local"
        found.append(Translated("transformer_impl", f"{of_before} is of releases whose --transformer-impl is local by default"))
    if values.get("transformer_impl") == "local" and (of_before or values.get("use_legacy_models") or is_of_mindspeed(values)):
        flash_of_own_modules(values)
    found += [*translate_deepspeed(values), *_flagscale_width(values), *_experts_of_megablocks(values), *translate_mindspeed(values)]
    recomputes = values.get("checkpoint_activations") or values.get("recompute_granularity") == "full"
    shares = values.pop("partition_activations", False) and recomputes and not values.get("sequence_parallel")
    if shares and values.get("tensor_model_parallel_size") not in (None, 1):
        values["distribute_saved_activations"] = True
    for key, why in NOT_PLANNED.items():
        name, _, word = key.partition("=")
        if (given := values.pop(name, None)) not in (None, False, 0, "disable") and word in ("", str(given)):
            found.append(Translated(name, f"{flag(name)}{' ' * bool(word)}{word}: {why}", uncertain=True))
    return found


_BEFORE_CORE = (
    "DDP_impl",
    "data_impl",
    "activations_checkpoint_method",
    "distribute_checkpointed_activations",
    "checkpoint_num_layers",
    "no_contiguous_buffers_in_local_ddp",
    "use_contiguous_buffers_in_local_ddp",
)
"""Arguments that Megatron-LM dropped before its layers were Transformer Engine's by default.

Source: `megatron/arguments.py` of NVIDIA/Megatron-LM from 2021 to 2023.
"""


def _of_before_core(values: dict[str, Any]) -> str:
    """The argument which shows that the modules are those of Megatron-LM before Megatron-Core; empty for other launches.

    MindSpeed's tokenizers are of MindSpeed alone, which had its own modules without `--use-mcore-models`
    (`mindspeed_llm/training/arguments.py` of Ascend/MindSpeed-LLM in 2024).
    """
    if values.get("use_mcore_models") or values.get("deepspeed"):
        return ""
    if values.get("tokenizer_type") == "PretrainedFromHF":
        return "MindSpeed without --use-mcore-models"
    return next((flag(key) for key in _BEFORE_CORE if values.get(key) not in (None, False)), "")


def _experts_of_megablocks(values: dict[str, Any]) -> list[Translated]:
    """Experts of megablocks, whose launches state the weight of a loss; one switch spreads them over all data ranks.

    Source: `megablocks/layers/mpu.py` and `exp/moe` of databricks/megablocks.
    """
    if values.get("moe_loss_weight") is not None and values.get("moe_num_experts") is not None:
        values["num_experts"] = values.pop("moe_num_experts")
    keys = "nproc_per_node", "num_experts", "nnodes", "tensor_model_parallel_size", "pipeline_model_parallel_size"
    each, experts, nodes, tp, pp = (size if isinstance(size := values.get(key), int) and size > 0 else 1 for key in keys)
    if not values.pop("moe_expert_model_parallelism", False):
        return []
    values["expert_model_parallel_size"] = min(experts, max(1, each * nodes // (tp * pp)))
    said = f"--moe-expert-model-parallelism of megablocks spreads experts over {values['expert_model_parallel_size']} data ranks"
    return [Translated("expert_model_parallel_size", said)]


def _flagscale_width(values: dict[str, Any]) -> list[Translated]:
    """The inner width of gated MLPs that FlagScale derives where none is stated; next to a stated one its arguments have no effect.

    Source: `flagscale/runner/auto_tuner/utils.py` of FlagOpen/FlagScale, as in `arguments.py` of its Megatron-LM.
    """
    multiple, factor, hidden = (values.get(key) for key in ("multiple_of", "hidden_dim_multiplier", "hidden_size"))
    if not (isinstance(multiple, int) and isinstance(hidden, int) and multiple > 0):
        return []
    for key in ("multiple_of", "hidden_dim_multiplier"):
        values.pop(key, None)
    if values.get("ffn_hidden_size") is not None or not values.get("swiglu"):
        return []
    width = int(int(4 * hidden * 2 / 3) * (factor if isinstance(factor, int | float) else 1))
    values["ffn_hidden_size"] = -(-width // multiple) * multiple
    return [Translated("ffn_hidden_size", f"--multiple-of {multiple} gives --ffn-hidden-size {values['ffn_hidden_size']}, as in FlagScale")]


def decides_a_tensor(key: str, value: Any) -> bool:
    """True for an unknown argument whose name says that it decides the size of a tensor."""
    return key in MEANT or names_a_tensor(key, value)


def letters(word: Any) -> str:
    """A word without case and signs between its letters."""
    return re.sub(r"[^a-z0-9]", "", str(word).lower())
