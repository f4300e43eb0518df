"""Everything of a launch beside its model: mesh, schedule, batch, precision, optimizer, recompute, host, training."""

from __future__ import annotations

import re
from typing import Any

from megaplan.hosts.megatron.arguments import FSDP_KEYS, other_fsdp
from megaplan.hosts.megatron.workspaces import setting_bytes
from megaplan.importers.megatron.model import Stack
from megaplan.importers.megatron.read import Arguments

FEATURES = {
    "fine_grained_activation_offloading": "activation_offload",
    "cpu_offloading": "activation_offload",
    "enable_cuda_graph": "cuda_graphs",
    "delay_wgrad_compute": "delayed_wgrad",
    "defer_embedding_wgrad_compute": "deferred_embedding_wgrad",
    "export_kd_teacher_load": "distillation",
}
"""Switches that are features which `host.features` names."""
PRICED_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe")
_DTYPES = ("fp32", "bf16", "fp16")


def world_size(launch: Arguments, given: int | None, least: int) -> tuple[int, bool]:
    """GPUs of the job, and whether the launch states them.

    Args:
        launch: The arguments; of a torchrun line its nodes and processes are read.
        given: What the caller knows.
        least: What the degrees need.
    """
    nodes, processes = launch.value("nnodes", 1), launch.value("nproc_per_node")
    stated = launch.optional("world_size")
    if given is not None:
        return given, True
    if stated is not None:
        return stated, True
    if isinstance(processes, int) and isinstance(nodes, int):
        return nodes * processes, True
    return least, False


def read_mesh(launch: Arguments, num_stages: int, gpus: int | None) -> tuple[dict[str, Any], bool]:
    """Degrees; and whether the launch states its GPUs."""
    tp, pp, cp, ep = (launch.whole(f"{axis}_parallel_size", 1) for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))
    experts = launch.value("num_experts") is not None
    etp = launch.whole("expert_tensor_parallel_size", tp)
    if not experts:  # they say nothing then
        ep = etp = 1
    inner = tp * cp
    least = pp * inner * max(1, ep * etp // inner)
    total, stated = world_size(launch, gpus, least)
    if total % (pp * inner) or total < least:
        detail = f"{total} GPUs, and tp · pp · cp = {tp} · {pp} · {cp}, ep · etp = {ep} · {etp} need a multiple of {least}"
        launch.values.setdefault("world_size", total)
        launch.cannot("world_size", detail)
        total = least
    data = total // (pp * inner)
    instances = launch.whole("num_distributed_optimizer_instances", 1)
    if data % instances:
        launch.cannot("num_distributed_optimizer_instances", f"{data} data ranks do not divide over it", 1)
        instances = 1
    if tp > 1 and not launch.given("sequence_parallel"):
        launch.cannot("sequence_parallel", "sequence parallelism of a plan is on wherever tp > 1", "")
    launch.given("sequence_parallel")
    vpp = num_stages // pp
    mesh = {"pp": pp, "vpp": vpp, "dp_replicate": instances, "dp_shard": data // instances, "cp": cp, "tp": tp, "ep": ep, "etp": etp}
    return {**mesh, "vocab_parallel": tp > 1}, stated


def read_batch(launch: Arguments, mesh: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`batch` and `schedule`."""
    size = launch.whole("micro_batch_size", 1)
    ranks = mesh["dp_replicate"] * mesh["dp_shard"]
    total = launch.whole("global_batch_size", size * ranks)
    if total % (size * ranks):
        why = f"micro_batch_size = {size}, {ranks} data ranks, and {total} % {size * ranks} = {total % (size * ranks)}"
        launch.cannot("global_batch_size", why, size * ranks)
    kind = "interleaved_1f1b" if mesh["vpp"] > 1 else "1f1b"
    return {
        "schedule": {"kind": kind, "num_microbatches": max(1, total // (size * ranks))},
        "batch": {"micro_batch_size": size, "seq_length": launch.whole("seq_length")},
    }


def read_state(launch: Arguments) -> dict[str, dict[str, Any]]:
    """`precision` and `optimizer`."""
    if not launch.given("bf16"):
        launch.cannot("bf16", "parameters of Megatron are priced in bf16", "")
    for key in ("fp16", "fp8_format", "fp4_format", "fp8_recipe", "fp8_param_gather"):
        if launch.value(key) not in (None, False):
            launch.cannot(key, "parameters of Megatron are priced in bf16")
    aware = launch.given("use_precision_aware_optimizer")
    grads = launch.word("main_grads_dtype", "fp32", ("fp32", "bf16"))
    if launch.given("grad_reduce_in_bf16"):
        grads = "bf16"
    moments = launch.word("exp_avg_dtype", "fp32", _DTYPES)
    if launch.word("exp_avg_sq_dtype", "fp32", _DTYPES) != moments:
        launch.cannot("exp_avg_sq_dtype", f"both moments of a spec have one dtype, and the first is {moments}", moments)
    if launch.value("main_params_dtype", "fp32") != "fp32":
        launch.cannot("main_params_dtype", "masters of a spec's Megatron are fp32", "fp32")
    if not aware and moments != "fp32":
        launch.cannot("exp_avg_dtype", "only the precision-aware optimizer keeps moments below fp32", "fp32")
    optimizer = launch.word("optimizer", "adam", ("adam", "muon", "dist_muon"))
    return {
        "precision": {"params": "bf16", "grads": grads, "master": "fp32", "moments": moments, "reduce": grads},
        "optimizer": {
            "matrix": "adamw" if optimizer == "adam" else "muon",
            "newton_schulz_steps": launch.whole("muon_num_ns_steps", 5),
        },
    }


def read_host(launch: Arguments, stack: Stack, mesh: dict[str, Any], muon: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """`host` and `recompute`."""
    backend = launch.value("attention_backend", "auto")
    if backend == "auto":
        backend = "flash"
    if launch.given("use_flash_attn"):
        backend = "flash"
    fused = launch.given("cross_entropy_loss_fusion")
    kind = launch.value("cross_entropy_fusion_impl", "native")
    host: dict[str, Any] = {
        "name": "megatron",
        "model": "hybrid" if stack.hybrid else "gpt",
        "attention_backend": backend,
        "cross_entropy": kind if fused else "unfused",
        "wgrad_fusion": not launch.given("no_gradient_accumulation_fusion"),
        "attention_mask": not launch.given("no_create_attention_mask_in_dataloader"),
        "hidden_dropout": launch.number("hidden_dropout", 0.1),
        "attention_dropout": launch.number("attention_dropout", 0.1),
        "cublas_workspace_kib": _workspace_kib(launch),
        "distributed_optimizer": launch.given("use_distributed_optimizer"),
        "precision_aware_optimizer": launch.given("use_precision_aware_optimizer"),
        "moe_dispatcher": launch.word("moe_token_dispatcher_type", "allgather", ("allgather", "alltoall", "flex")),
        "moe_flex_backend": _flex_backend(launch),
        "moe_grouped_gemm": launch.given("moe_grouped_gemm"),
        "moe_permute_fusion": launch.given("moe_permute_fusion"),
        "moe_overlap": launch.given("overlap_moe_expert_parallel_comm"),
        "fused_squared_relu": launch.given("use_fused_weighted_squared_relu"),
        "tp_comm_overlap": launch.given("tp_comm_overlap"),
        "deterministic_mode": launch.given("deterministic_mode"),
        "mtp_repeated": launch.given("mtp_use_repeated_layer"),
    }
    if mesh["vpp"] > 1:
        host["microbatch_group_size"] = launch.optional("microbatch_group_size_per_virtual_pipeline_stage")
    features = {feature for key, feature in FEATURES.items() if launch.value(key) not in (None, False)}
    if launch.value("cuda_graph_impl", "none") != "none":
        features.add("cuda_graphs")
    if launch.given("use_megatron_fsdp") and not wholly_sharded(launch):
        features.add("fsdp")
    if muon and host["distributed_optimizer"] and not launch.given("no_use_layer_wise_param_layout"):
        features.add("layer_wise_param_layout")
    if features:
        host["features"] = sorted(features)
        for key in ("offload_modules", *FSDP_KEYS, *(key for key in launch.values if key.startswith("megatron_fsdp_"))):
            launch.value(key)
    recompute = _recompute(launch, host)
    return host, recompute


def wholly_sharded(launch: Arguments) -> bool:
    """Whether Megatron-FSDP runs as `sharding.reshard_after_forward` says."""
    return launch.given("use_megatron_fsdp") and not other_fsdp({key: launch.value(key) for key in FSDP_KEYS})


def _flex_backend(launch: Arguments) -> str:
    if launch.value("moe_token_dispatcher_type") != "flex":
        return "deepep"
    return launch.word("moe_flex_dispatcher_backend", "deepep", ("deepep", "hybridep"))


def _workspace_kib(launch: Arguments) -> int | None:
    """Of a handle; None where the launch leaves it to torch."""
    setting = launch.environment.get("CUBLAS_WORKSPACE_CONFIG")
    return None if setting is None else setting_bytes(str(setting)) // 1024


def _recompute(launch: Arguments, host: dict[str, Any]) -> dict[str, Any]:
    granularity, modules = launch.value("recompute_granularity"), launch.value("recompute_modules")
    method, layers = launch.value("recompute_method"), launch.optional("recompute_num_layers")
    if granularity == "full":
        if method != "uniform":
            launch.cannot("recompute_method", "groups of one size are priced", "uniform")
        host["recompute_num_layers"] = layers or 1
    elif granularity == "selective":
        words = " ".join(map(str, modules)) if isinstance(modules, list) else str(modules or "core_attn")
        named = re.findall(r"[a-z_]+", words)
        for module in named:
            if module not in PRICED_MODULES:
                launch.cannot("recompute_modules", f"{module} is not priced; those are {', '.join(PRICED_MODULES)}")
        others = sorted(set(named) & set(PRICED_MODULES) - {"core_attn"})
        if others:
            host["recompute_modules"] = others
        if "core_attn" in named:
            return {"blocks": {"A": "selective"}}
    elif granularity is not None:
        launch.cannot("recompute_granularity", "it is full or selective")
    return {}


def read_training(launch: Arguments) -> dict[str, Any]:
    """`training`; keys that the launch leaves open keep the spec's defaults."""
    found: dict[str, Any] = {}
    for key, ours in (("train_iters", "steps"), ("seed", "seed")):
        if launch.value(key) is not None:
            found[ours] = launch.whole(key)
    if launch.value("lr") is not None:
        found["learning_rate"] = launch.number("lr", 3e-4)
    if launch.value("weight_decay") is not None:
        found["weight_decay"] = launch.number("weight_decay", 0.1)
    if launch.value("clip_grad") is not None:
        found["gradient_clip"] = launch.number("clip_grad", 1.0) or None
    rate = _rate(launch, found.get("learning_rate"))
    return {**found, **({"rate_schedule": rate} if rate else {})}


def _rate(launch: Arguments, base: float | None) -> dict[str, Any] | None:
    style = launch.value("lr_decay_style")
    warmup, least = launch.value("lr_warmup_iters"), launch.value("min_lr")
    decay, shape = launch.value("lr_wsd_decay_iters"), launch.value("lr_wsd_decay_style", "exponential")
    fraction = launch.value("lr_warmup_fraction")
    if style is None:
        return None
    kept: dict[str, Any] = {} if warmup is None else {"warmup_steps": warmup}
    final = {} if not base or least is None else {"final_fraction": float(f"{float(least) / base:.12g}")}
    if fraction is not None:
        launch.tell("lr_warmup_fraction", "warm-up of a spec is in steps")
    if style == "constant":
        return {"kind": "constant", **kept}
    if style == "cosine":
        return {"kind": "cosine", **kept, **final}
    shapes = {"linear": "linear", "minus_sqrt": "sqrt"}
    if style == "WSD" and isinstance(decay, int) and shape in shapes:
        return {"kind": "wsd", **kept, "decay_steps": decay, "decay": shapes[shape], **final}
    launch.tell("lr_decay_style", "rates of a spec are constant, cosine or WSD with a linear or square-root decay")
    return None
