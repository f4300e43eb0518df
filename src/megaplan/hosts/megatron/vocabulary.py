"""Megatron-LM's launch arguments: one row an argument, read by the importer, the exporter, the byte model and the reference page.

Source: `megatron/training/arguments.py` and the config classes that its parser is made from, at d98e8a64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from megaplan.hosts.megatron.argument import (
    ABSENT_IS_ONE,
    ABSENT_IS_ZERO,
    FEATURE,
    JOINT,
    NEGATED,
    REQUIRED,
    WHOLE,
    ZERO_IS_NONE,
    Argument,
    Kind,
    count,
    feature,
    number,
    only,
    switch,
    text,
    words_of,
)
from megaplan.hosts.megatron.not_carried import NOT_CARRIED


def _positive(value: Any) -> bool:
    return float(value) > 0


def _at_end(key: str) -> dict[str, Any]:
    return {"key": key, "conversion": JOINT, "touches": "stages", "note": "where stages begin, in a GPT model without a layout"}


_16BIT = "parameters of Megatron are priced in bf16"
_ALL = "parameters, activations"
_WIDTHS: dict[str, Any] = {"touches": _ALL, "block": "mla"}
_GROUPED: dict[str, Any] = {"touches": _ALL, "block": "gqa"}
_EXPERTS: dict[str, Any] = {"touches": "activations, buffers", "block": "moe"}
_DTYPES = ("fp32", "bf16", "fp16")

_LAYERS = (
    text("hybrid_layer_pattern", "model.pattern", None, JOINT, touches=_ALL, note="one symbol a layer, '|' between stages"),
    text("hybrid_override_pattern", "model.pattern", None, JOINT, touches=_ALL, note="older name of --hybrid-layer-pattern; not written"),
    count("num_layers", "model.num_layers", REQUIRED, JOINT, touches=_ALL, note="of a GPT model; a layer is an A and a D or E"),
    text("moe_layer_freq", "model.pattern", 1, JOINT, touches=_ALL, note="which layers of a GPT model have experts"),
    text("pipeline_model_parallel_layout", "split.spans", None, JOINT, touches="stages", note="stages of a GPT model"),
    *(count(name, **_at_end("split.spans")) for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")),
    *(switch(f"account_for_{end}_in_pipeline_split", **_at_end("split.spans")) for end in ("embedding", "loss")),
    *(count(name, **_at_end("mesh.vpp")) for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")),
    count("mtp_num_layers", "model.features.mtp.depth", None, JOINT, touches=_ALL, note="prediction modules; a pattern has them after '/'"),
)
_MODEL = (
    count("hidden_size", "model.hidden_size", REQUIRED, touches=_ALL, field="hidden_size"),
    count(
        "vocab_size",
        "model.vocab_size",
        REQUIRED,
        JOINT,
        touches=_ALL,
        field="vocab_size",
        note="padded to a multiple of --make-vocab-size-divisible-by",
    ),
    count("make_vocab_size_divisible_by", "model.vocab_size", 128, JOINT, touches=_ALL, note="times tp; the padded size is the key"),
    count(
        "padded_vocab_size", "model.vocab_size", None, JOINT, touches=_ALL, note="in place of --vocab-size and its multiple; not written"
    ),
    switch("untie_embeddings_and_output_weights", "model.tie_embeddings", NEGATED, touches="parameters", field="tied"),
    only("normalization", "RMSNorm", "LayerNorm", "norms of a spec are RMSNorm", touches=_ALL),
    number("norm_epsilon", "model.norm_eps", 1e-5),
    only("disable_bias_linear", True, False, "linears of a spec have no bias", Kind.SWITCH, touches="parameters", dest="add_bias_linear"),
    only("transformer_impl", "transformer_engine", "transformer_engine", "only Transformer Engine's tensors are listed", touches=_ALL),
    switch("swiglu", "model.mlp.activation", JOINT, touches=_ALL, note="swiglu of all MLPs and experts"),
    switch("squared_relu", "model.mlp.activation", JOINT, touches="activations", note="relu2; neither is gelu"),
    count("ffn_hidden_size", "model.mlp.ffn_hidden_size", None, JOINT, touches=_ALL, note="absent: 4 hidden sizes, 8/3 with --swiglu"),
    text("position_embedding_type", "model.attention.nope_layers", "learned_absolute", JOINT, touches="activations", note="rope or none"),
    count("num_attention_heads", "model.attention.num_heads", REQUIRED, JOINT, touches=_ALL, note="1 without attention"),
    number("rotary_base", "model.attention.rope_theta", 10_000.0, WHOLE),
    switch("group_query_attention", "model.attention.num_kv_heads", JOINT, touches=_ALL, note="off: as many groups as heads"),
    count("num_query_groups", "model.attention.num_kv_heads", 1, JOINT, touches=_ALL, note="with --group-query-attention"),
    count("kv_channels", "model.attention.head_dim", None, JOINT, touches=_ALL, note="absent: hidden size / heads"),
    switch("qk_layernorm", "model.attention.qk_norm", **_GROUPED, field="qk_norm", price=bool),
    switch("add_qkv_bias", "model.attention.bias", **_GROUPED, field="qkv_bias", price=bool),
    text("window_size", "model.attention.window_size", None, JOINT, touches="time", note="positions before a token and 0 after it"),
    switch("multi_latent_attention", "model.attention.kind", JOINT, touches=_ALL, note="kind: mla; a pattern has + for it"),
    count("q_lora_rank", "model.attention.q_lora_rank", None, **_WIDTHS, field="latent.q_lora_rank"),
    count("kv_lora_rank", "model.attention.kv_lora_rank", 32, **_WIDTHS, field="latent.kv_lora_rank"),
    count("qk_head_dim", "model.attention.qk_nope_head_dim", 128, **_WIDTHS, field="latent.qk_head_dim"),
    count("qk_pos_emb_head_dim", "model.attention.qk_rope_head_dim", 64, **_WIDTHS, field="latent.qk_pos_emb_head_dim"),
    count("v_head_dim", "model.attention.v_head_dim", 128, **_WIDTHS, field="latent.v_head_dim"),
    count("mamba_num_heads", "model.mamba.num_heads", None, JOINT, touches=_ALL, note="absent: 2 hidden sizes / head dimension"),
    count("mamba_head_dim", "model.mamba.head_dim", 64, touches=_ALL, field="mamba.head_dim"),
    count("mamba_state_dim", "model.mamba.state_dim", 128, touches=_ALL, field="mamba.state_dim"),
    count("mamba_num_groups", "model.mamba.num_groups", 8, touches=_ALL, field="mamba.num_groups"),
)
_MOE = (
    count("num_experts", "model.moe.num_experts", REQUIRED, touches="parameters, buffers", field="moe.num_experts"),
    count("moe_router_topk", "model.moe.top_k", 2, touches="activations, buffers", field="moe.top_k"),
    count(
        "moe_ffn_hidden_size",
        "model.moe.ffn_hidden_size",
        None,
        JOINT,
        touches=_ALL,
        field="moe.ffn_hidden_size",
        note="absent: --ffn-hidden-size",
    ),
    count(
        "moe_shared_expert_intermediate_size",
        "model.moe.shared_ffn_hidden_size",
        None,
        ABSENT_IS_ZERO,
        touches=_ALL,
        field="moe.shared_ffn_hidden_size",
    ),
    only("moe_shared_expert_gate", False, False, "shared experts of a spec have no gate", Kind.SWITCH, touches="parameters"),
    switch("moe_router_pre_softmax", "model.moe.normalize_top_k", NEGATED, block="moe"),
    text("moe_router_load_balancing_type", "model.moe.balance_loss_coefficient", "aux_loss", JOINT, note="seq_aux_loss, or none"),
    number("moe_aux_loss_coeff", "model.moe.balance_loss_coefficient", 0.0, JOINT, note="of seq_aux_loss alone"),
    number("moe_z_loss_coeff", "model.moe.z_loss_coefficient", 0.0, ABSENT_IS_ZERO),
    number("moe_expert_capacity_factor", "model.moe.capacity_factor", touches="activations, buffers", field="moe.capacity_factor"),
    Argument(
        "moe_token_dispatcher_type", Kind.WORD, "host.moe_dispatcher", "allgather", words=("allgather", "alltoall", "flex"), **_EXPERTS
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
    switch("moe_grouped_gemm", "host.moe_grouped_gemm", field="moe.grouped_gemm", **_EXPERTS),
    switch("moe_permute_fusion", "host.moe_permute_fusion", field="moe.permute_fusion", **_EXPERTS),
    switch("overlap_moe_expert_parallel_comm", "host.moe_overlap", field="moe.overlap", **_EXPERTS),
    switch("use_fused_weighted_squared_relu", "host.fused_squared_relu", field="bias_activation_fusion", **_EXPERTS),
)
_RUN = (
    count("tensor_model_parallel_size", "mesh.tp", 1, touches="all", field="tp"),
    switch(
        "sequence_parallel",
        "mesh.tp",
        JOINT,
        touches="activations",
        field="sequence_parallel",
        price=lambda tp: tp > 1,
        note="on wherever tp > 1",
    ),
    count("pipeline_model_parallel_size", "mesh.pp", 1, touches="all", field="pp"),
    count("context_parallel_size", "mesh.cp", 1, touches="activations", field="cp"),
    count("expert_model_parallel_size", "mesh.ep", 1, touches="all", field="ep", note="1 without experts"),
    count("expert_tensor_parallel_size", "mesh.etp", None, JOINT, touches="all", field="etp", note="absent: tp; 1 without experts"),
    count("num_distributed_optimizer_instances", "mesh.dp_replicate", None, ABSENT_IS_ONE, touches="optimizer state"),
    count("world_size", "mesh.dp_shard", None, JOINT, touches="all", note="GPUs; else nodes times processes"),
    text("nnodes", "mesh.dp_shard", 1, JOINT, touches="all", note="of torchrun"),
    text("nproc_per_node", "mesh.dp_shard", None, JOINT, touches="all", note="of torchrun"),
    count("micro_batch_size", "batch.micro_batch_size", 1, touches="activations", field="micro_batch_size"),
    count("global_batch_size", "schedule.num_microbatches", None, JOINT, touches="time", note="absent: one microbatch a data rank"),
    count("seq_length", "batch.seq_length", REQUIRED, touches="activations", field="seq_length"),
    count(
        "max_position_embeddings", "batch.seq_length", None, JOINT, note="written as the sequence length; not read: no positions learned"
    ),
    only("bf16", True, False, _16BIT, Kind.SWITCH, touches=_ALL),
    *(only(name, None, None, _16BIT, touches=_ALL) for name in ("fp16", "fp4_format", "fp8_recipe", "fp8_param_gather")),
    only("fp8_format", None, None, _16BIT, touches=_ALL, dest="fp8"),
    switch(
        "grad_reduce_in_bf16",
        "precision.grads",
        JOINT,
        touches="gradients",
        field="gradient_bytes",
        price=lambda dtype: dtype.bytes,
        note="bf16",
    ),
    count("train_iters", "training.steps"),
    Argument("seed", Kind.WHOLE, "training.seed"),
    number("lr", "training.learning_rate"),
    number("weight_decay", "training.weight_decay"),
    number("clip_grad", "training.gradient_clip", conversion=ZERO_IS_NONE),
    count("lr_warmup_iters", "training.rate_schedule.warmup_steps", None, JOINT, note="with --lr-decay-style"),
    number("lr_warmup_fraction", "", None, JOINT, note="not carried: warm-up of a spec is in steps"),
    number("min_lr", "training.rate_schedule.final_fraction", None, JOINT, note="over --lr"),
    text("lr_decay_style", "training.rate_schedule.kind", None, JOINT, note="constant, cosine or WSD"),
    count("lr_wsd_decay_iters", "training.rate_schedule.decay_steps", None, JOINT, note="of WSD"),
    text("lr_wsd_decay_style", "training.rate_schedule.decay", "exponential", JOINT, note="linear, or minus_sqrt for sqrt"),
)
FSDP = tuple(
    only(name, means, default, note, block="fsdp", touches="parameters, gradients, buffers")
    for name, means, default, note in (
        ("data_parallel_sharding_strategy", "optim_grads_params", "no_shard", "buffers of whole parameters"),
        ("fsdp_double_buffer", None, None, "buffers that stay"),
        ("outer_dp_sharding_strategy", "no_shard", "no_shard", "a second level of shards"),
        ("megatron_fsdp_version", 1, 1, "another implementation"),
        ("megatron_fsdp_main_params_dtype", "fp32", None, "buffers of another type than fp32"),
        ("megatron_fsdp_main_grads_dtype", "fp32", None, "buffers of another type than fp32"),
        ("megatron_fsdp_grad_comm_dtype", "fp32", None, "buffers of another type than fp32"),
    )
)
"""Arguments of Megatron-FSDP itself that decide its buffers; all else than the one value named is not priced."""
_STATE = (
    Argument(
        "optimizer",
        Kind.WORD,
        "optimizer.matrix",
        "adam",
        words_of({"adam": "adamw", "muon": "muon", "dist_muon": "muon"}),
        words=("adam", "muon", "dist_muon"),
        touches="optimizer state",
        field="optimizer",
        price=lambda matrix: "muon" if "muon" in matrix else "adam",
    ),
    count("muon_num_ns_steps", "optimizer.newton_schulz_steps", 5, touches="time"),
    switch("use_distributed_optimizer", "host.distributed_optimizer", touches="optimizer state", field="distributed_optimizer"),
    switch(
        "no_use_layer_wise_param_layout",
        "host.features",
        JOINT,
        touches="optimizer state",
        dest="use_layer_wise_param_layout",
        note="written for Muon with a distributed optimizer; there its absence is the feature layer_wise_param_layout, refused",
    ),
    switch(
        "use_megatron_fsdp",
        "sharding.reshard_after_forward",
        JOINT,
        touches="parameters, gradients, buffers",
        field="fsdp",
        note="with those of --megatron-fsdp at their one accepted value; else the feature fsdp, refused",
    ),
    *FSDP,
    only("ckpt_format", "fsdp_dtensor", None, "the one that Megatron-FSDP writes", block="fsdp"),
    switch(
        "use_precision_aware_optimizer",
        "host.precision_aware_optimizer",
        touches="optimizer state",
        field="master_bytes",
        price=lambda aware: 2 if aware else 4,  # the upper 16 bits are the bf16 parameter's
    ),
    Argument(
        "main_grads_dtype",
        Kind.WORD,
        "precision.grads",
        "fp32",
        JOINT,
        words=("fp32", "bf16"),
        touches="gradients",
        note="bf16 under --grad-reduce-in-bf16",
    ),
    only("main_params_dtype", "fp32", "fp32", "masters of a spec's Megatron are fp32", touches="optimizer state"),
    Argument(
        "exp_avg_dtype",
        Kind.WORD,
        "precision.moments",
        "fp32",
        JOINT,
        words=_DTYPES,
        touches="optimizer state",
        field="moment_bytes",
        price=lambda dtype: dtype.bytes,
        note="below fp32 of the precision-aware optimizer alone",
    ),
    Argument(
        "exp_avg_sq_dtype",
        Kind.WORD,
        "precision.moments",
        "fp32",
        JOINT,
        words=_DTYPES,
        touches="optimizer state",
        note="as --exp-avg-dtype",
    ),
)
_HOST = (
    text(
        "attention_backend",
        "host.attention_backend",
        "auto",
        words_of({"flash": "flash", "auto": "flash"}),
        touches="activations",
        field="attention_backend",
    ),
    switch("use_flash_attn", "host.attention_backend", JOINT, touches="activations", note="older way to say flash; not written"),
    switch("cross_entropy_loss_fusion", "host.cross_entropy", JOINT, touches="activations", note="off: unfused"),
    text(
        "cross_entropy_fusion_impl",
        "host.cross_entropy",
        "native",
        JOINT,
        touches="activations",
        field="cross_entropy",
        note="native or te, with --cross-entropy-loss-fusion",
    ),
    switch(
        "no_gradient_accumulation_fusion",
        "host.wgrad_fusion",
        NEGATED,
        touches="buffers",
        field="wgrad_fusion",
        dest="gradient_accumulation_fusion",
    ),
    switch(
        "no_create_attention_mask_in_dataloader",
        "host.attention_mask",
        NEGATED,
        touches="buffers",
        field="attention_mask",
        dest="create_attention_mask_in_dataloader",
    ),
    number("hidden_dropout", "host.hidden_dropout", 0.1, touches="activations", field="hidden_dropout", price=_positive),
    number("attention_dropout", "host.attention_dropout", 0.1, touches="activations", field="attention_dropout", price=_positive),
    switch("tp_comm_overlap", "host.tp_comm_overlap", touches="buffers, time", field="tp_comm_overlap"),
    switch("deterministic_mode", "host.deterministic_mode", touches="activations"),
    switch("mtp_use_repeated_layer", "host.mtp_repeated", touches="parameters", field="mtp_repeated"),
    count("microbatch_group_size_per_virtual_pipeline_stage", "host.microbatch_group_size", touches="activations, time"),
    text("recompute_granularity", "recompute.blocks", None, JOINT, touches="activations, time", note="selective, or full"),
    text("recompute_method", "host.recompute_num_layers", None, JOINT, touches="activations, time", note="uniform, with full"),
    count("recompute_num_layers", "host.recompute_num_layers", None, JOINT, touches="activations, time", note="with full; absent: 1"),
    text(
        "recompute_modules",
        "host.recompute_modules",
        None,
        JOINT,
        touches="activations, time",
        note="with selective; core_attn is recompute.blocks.A",
    ),
)
_REFUSED = (
    feature("fine_grained_activation_offloading", "activation_offload", "activations are offloaded to the host while a layer runs"),
    feature("cpu_offloading", "activation_offload", "activations are offloaded to the host"),
    feature("cuda_graph_impl", "cuda_graphs", "static buffers of CUDA graphs"),
    feature("enable_cuda_graph", "cuda_graphs", "static buffers of CUDA graphs"),
    feature("delay_wgrad_compute", "delayed_wgrad", "inputs and gradients of delayed weight gradients"),
    feature("defer_embedding_wgrad_compute", "deferred_embedding_wgrad", "queued gradients of logits"),
    feature("export_kd_teacher_load", "distillation", "a teacher model"),
    only("flextron", None, None, "router and mask tensors of elastic training", touches="buffers"),
    text("offload_modules", "host.features", None, JOINT, touches="buffers", note="with --fine-grained-activation-offloading"),
)
TABLE: tuple[Argument, ...] = (*_LAYERS, *_MODEL, *_MOE, *_RUN, *_STATE, *_HOST, *_REFUSED, *NOT_CARRIED)
"""In the order in which they are written."""
ARGUMENTS = MappingProxyType({row.name: row for row in TABLE})
FEATURES = tuple(row for row in TABLE if row.conversion is FEATURE)


def section_rows(section: str) -> Iterator[Argument]:
    """The rows that decide a key of this section alone."""
    return (row for row in TABLE if row.direct and row.key.rpartition(".")[0] == section)


def other_fsdp(value_of: Callable[[str], Any]) -> list[str]:
    """How Megatron-FSDP's own arguments, `FSDP`, depart from what is priced: all is sharded, gradients and state in fp32.

    Args:
        value_of: An argument's value, or None where it is absent.
    """
    found = ((row, value_of(row.name)) for row in FSDP)
    given = ((row, row.default if value is None else value) for row, value in found)
    return [f"{row.name} = {value}: {row.note}" for row, value in given if (value or row.means) and value != row.means]


def job_fields(value_of: Callable[[Argument], Any], part: str = "", *, direct_only: bool = False) -> dict[str, Any]:
    """Fields of `MegatronJob`, or of one of its parts, that the table prices.

    Args:
        value_of: The key's value, of a row.
        part: `moe`, `latent` or `mamba`; empty for the job's own fields.
        direct_only: Without those that several arguments decide together.
    """
    prefix = f"{part}." if part else ""
    rows = (row for row in TABLE if row.field.rpartition(".")[0] == part and row.field and (row.direct or not direct_only))
    return {row.field.removeprefix(prefix): row.price(value_of(row)) for row in rows}
