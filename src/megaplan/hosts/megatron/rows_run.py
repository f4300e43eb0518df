"""Rows of the table that say how the model is run: degrees, batch, precision, optimizer, kernels and recompute.

Source: `megatron/training/arguments.py` and the config classes that its parser is made from, at d98e8a64.
"""

from __future__ import annotations

from typing import Any

from megaplan.hosts.megatron.argument import (
    ABSENT_IS_ONE,
    JOINT,
    NEGATED,
    REQUIRED,
    ZERO_IS_NONE,
    Argument,
    Kind,
    count,
    number,
    only,
    switch,
    text,
    words_of,
)


def _positive(value: Any) -> bool:
    return float(value) > 0


_ALL = "parameters, activations"
_DTYPES = ("fp32", "bf16", "fp16")

RUN = (
    count("tensor_model_parallel_size", "mesh.tp", 1, touches="all", field="tp"),
    switch(
        "sequence_parallel",
        "host.sequence_parallel",
        JOINT,
        touches="activations",
        note="read where tp > 1",
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
    switch("bf16", "precision.params", JOINT, touches=_ALL, note="one of bf16 and fp16"),
    switch("fp16", "precision.params", JOINT, touches=_ALL, note="one of bf16 and fp16"),
    switch(
        "accumulate_allreduce_grads_in_fp32", "precision.grads", JOINT, touches="gradients", note="of fp16: fp32; off, fp16. Of bf16: on"
    ),
    Argument("fp8_format", Kind.WORD, "host.fp8_format", None, words=("hybrid", "e4m3"), touches=_ALL, field="fp8", price=bool, dest="fp8"),
    Argument(
        "fp8_recipe",
        Kind.WORD,
        "host.fp8_recipe",
        "delayed",
        JOINT,
        words=("delayed", "tensorwise", "mxfp8", "blockwise"),
        touches="time",
        note="with --fp8-format",
    ),
    switch("fp8_param_gather", "host.fp8_param_gather", touches="parameters", field="fp8_params"),
    only("fp4_format", None, None, "weights and activations in 4 bits", touches=_ALL, dest="fp4"),
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
STATE = (
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
HOST = (
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
    count(
        "microbatch_group_size_per_virtual_pipeline_stage",
        "host.microbatch_group_size",
        touches="activations, time",
        dest="microbatch_group_size_per_vp_stage",
    ),
    Argument(
        "transformer_impl",
        Kind.WORD,
        "host.transformer_impl",
        "transformer_engine",
        words=("transformer_engine", "local"),
        touches="activations, buffers",
        field="local",
        price=lambda implementation: implementation == "local",
    ),
    switch("recompute_activations", "recompute.blocks", JOINT, touches="activations, time", note="older way to say selective; not written"),
    switch("moe_layer_recompute", "host.recompute_modules", JOINT, touches="activations, time", note="older way to say moe; not written"),
    text("recompute_granularity", "recompute.blocks", None, JOINT, touches="activations, time", note="selective, or full"),
    text("recompute_method", "host.recompute_method", None, JOINT, touches="activations, time", note="uniform or block, with full"),
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
