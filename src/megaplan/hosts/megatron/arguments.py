"""A run from Megatron's launch arguments, with the defaults of its argument parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megaplan.hosts.megatron.job import EMBEDDING, LOSS, MTP, Dispatcher, LatentDims, MambaDims, MegatronJob, MoeDims
from megaplan.hosts.megatron.pattern import parse_hybrid
from megaplan.hosts.megatron.stages import parse_layout
from megaplan.hosts.megatron.workspaces import cublas_bytes, engine_bytes

UNMODELLED: dict[str, str] = {
    "fine_grained_activation_offloading": "activations are offloaded to the host while a layer runs",
    "cpu_offloading": "activations are offloaded to the host",
    "cuda_graph_impl": "static buffers of CUDA graphs",
    "enable_cuda_graph": "static buffers of CUDA graphs",
    "delay_wgrad_compute": "inputs and gradients of delayed weight gradients",
    "defer_embedding_wgrad_compute": "queued gradients of logits",
    "flextron": "router and mask tensors of elastic training",
    "export_kd_teacher_load": "a teacher model",
}
"""Arguments whose tensors are not modelled, and what they add."""

FSDP_UNMODELLED: dict[str, str] = {
    "num_experts": "gathered experts",
    "hybrid_layer_pattern": "units of hybrid stacks",
    "fp8_format": "buffers of 8-bit weights and their transposes",
}
"""Arguments of a model that Megatron-FSDP is priced without, and what they would add."""
MOMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
"""Of the precision-aware optimizer's moments, by `--exp-avg-dtype`."""
STALE_BEFORE = "2025-11"
"""The month from which measurements are of the software that is priced: October's experts and native cross entropy are others."""
FSDP_DTYPES = ("main_params", "main_grads", "grad_comm")
FSDP_KEYS = (
    "data_parallel_sharding_strategy",
    "fsdp_double_buffer",
    "outer_dp_sharding_strategy",
    "megatron_fsdp_version",
    *(f"megatron_fsdp_{part}_dtype" for part in FSDP_DTYPES),
)
"""Arguments of Megatron-FSDP itself that decide its buffers."""


def refusals(arguments: Mapping[str, Any], world_size: int | None = None) -> tuple[str, ...]:
    """Why the run cannot be priced; empty if it can.

    Args:
        arguments: Launch arguments, underscores for dashes.
        world_size: GPUs; None where they are not known.
    """
    found = [f"{key}: {why}" for key, why in UNMODELLED.items() if arguments.get(key) not in (None, False, "none")]
    implementation = arguments.get("transformer_impl", "transformer_engine")
    if implementation not in ("transformer_engine", "local"):
        found.append(f"transformer_impl = {implementation}: tensors of that implementation")
    if implementation == "local" and arguments.get("moe_grouped_gemm"):
        found.append("transformer_impl = local with moe_grouped_gemm: tensors of grouped experts outside Transformer Engine")
    if arguments.get("use_megatron_fsdp"):
        found += _fsdp_refusals(arguments)
    if arguments.get("recompute_granularity") == "full" and (whole := _whole_recompute(arguments)):
        found.append(whole)
    if flex_backend(arguments) not in (None, "deepep", "hybridep"):
        found.append(f"moe_flex_dispatcher_backend = {flex_backend(arguments)}: its buffers")
    layer_wise = "muon" in str(arguments.get("optimizer")) and arguments.get("use_distributed_optimizer")
    if layer_wise and not arguments.get("no_use_layer_wise_param_layout"):
        found.append("optimizer = muon with a layer-wise parameter layout: padding of its shards")
    if world_size is not None:
        found += _impossible(arguments, world_size)
    return tuple(found)


def stale(row: Mapping[str, Any]) -> str | None:
    """Why a measurement is of other software than what is priced, by its day and branch; None where it is not."""
    if row["branch"] == "long-term":
        return "the long-term branch runs older software"
    if row["measured"] < STALE_BEFORE:
        return f"measured on {row['measured']}, on software of October 2025 or older"
    return None


def _impossible(arguments: Mapping[str, Any], world_size: int) -> list[str]:
    """Why Megatron itself would not start: degrees and batches that do not divide."""
    get = arguments.get
    tp, pp, cp = degrees(arguments)
    inner = tp * pp * cp
    if world_size % inner:
        return [f"{world_size} GPUs, tp · pp · cp = {tp} · {pp} · {cp}, and {world_size} % {inner} = {world_size % inner}"]
    ranks, size = world_size // inner, int(get("micro_batch_size") or 1)
    total = int(get("global_batch_size") or ranks * size)
    if total % (ranks * size):
        batch = f"{ranks} data ranks of micro_batch_size = {size}"
        return [f"global_batch_size = {total}, {batch}, and {total} % {ranks * size} = {total % (ranks * size)}"]
    return []


def degrees(arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """tp, pp and cp."""
    tp, pp, cp = (int(arguments.get(f"{key}_parallel_size") or 1) for key in ("tensor_model", "pipeline_model", "context"))
    return tp, pp, cp


def flex_backend(arguments: Mapping[str, Any]) -> str | None:
    """The library behind the flex dispatcher; None under another one."""
    if arguments.get("moe_token_dispatcher_type") != "flex":
        return None
    return str(arguments.get("moe_flex_dispatcher_backend") or "deepep")


def _whole_recompute(arguments: Mapping[str, Any]) -> str | None:
    """Why recomputation of whole layers is not priced; None where there is none: `block` with no layers."""
    if arguments.get("recompute_method") == "block" and arguments.get("recompute_num_layers") == 0:
        return None
    return "recompute_granularity = full: recomputation of whole layers"


def _fsdp_refusals(arguments: Mapping[str, Any]) -> list[str]:
    """What Megatron-FSDP is priced without: all but 16-bit dense GPT models on one pipeline stage, wholly sharded, fp32 masters."""
    found = [f"{key}: {why}" for key, why in FSDP_UNMODELLED.items() if arguments.get(key)]
    if int(arguments.get("pipeline_model_parallel_size") or 1) > 1:
        found.append("pipeline_model_parallel_size: units gathered for several microbatches")
    return [f"use_megatron_fsdp with {each}" for each in (*found, *other_fsdp(arguments))]


def other_fsdp(arguments: Mapping[str, Any]) -> list[str]:
    """How Megatron-FSDP's own arguments, `FSDP_KEYS`, depart from what is priced: all is sharded, gradients and state in fp32."""
    get, found = arguments.get, []
    if (strategy := get("data_parallel_sharding_strategy", "no_shard")) != "optim_grads_params":
        found.append(f"data_parallel_sharding_strategy = {strategy}: buffers of whole parameters")
    if get("fsdp_double_buffer"):
        found.append("fsdp_double_buffer: buffers that stay")
    if get("outer_dp_sharding_strategy") not in (None, "no_shard"):
        found.append("outer_dp_sharding_strategy: a second level of shards")
    if (version := get("megatron_fsdp_version") or 1) != 1:
        found.append(f"megatron_fsdp_version = {version}: another implementation")
    for part in FSDP_DTYPES:
        if (dtype := get(f"megatron_fsdp_{part}_dtype")) != "fp32":
            found.append(f"megatron_fsdp_{part}_dtype = {dtype}: buffers of another type than fp32")
    return found


def unbalanced(arguments: Mapping[str, Any]) -> str | None:
    """Why no single number can be quoted for a rank with some of the experts: nothing in the run balances routing; None where it is.

    A balancing loss has the coefficient 0 unless `--moe-aux-loss-coeff` is given. Sinkhorn and the expert bias balance without one.
    """
    get = arguments.get
    if not get("num_experts") or int(get("expert_model_parallel_size") or 1) == 1 or get("moe_expert_capacity_factor"):
        return None
    kind = str(get("moe_router_load_balancing_type", "aux_loss"))
    if kind == "sinkhorn" or get("moe_router_enable_expert_bias") or float(get("moe_aux_loss_coeff") or 0):
        return None
    return f"moe_router_load_balancing_type = {kind} with moe_aux_loss_coeff = 0: nothing balances routing"


def job_from_arguments(
    arguments: Mapping[str, Any],
    world_size: int,
    vocab_size: int,
    platform: str,
    *,
    pp_rank: int | None = None,
    environment: Mapping[str, str] | None = None,
    month: str | None = None,
) -> MegatronJob:
    """A pipeline rank's run.

    Args:
        arguments: Launch arguments, underscores for dashes.
        world_size: GPUs.
        vocab_size: Padded vocabulary.
        platform: A device, such as `h100`; `dgx_` may stand before it.
        pp_rank: The rank; None for the last.
        environment: Variables of the launch.
        month: Of the image that runs, as `2026-05`; None for a new one.
    """
    get = arguments.get
    hidden, heads = int(arguments["hidden_size"]), int(get("num_attention_heads", 0))
    tp, pp, cp = degrees(arguments)
    ep = int(get("expert_model_parallel_size") or 1)
    num_experts = get("num_experts")
    etp = int(get("expert_tensor_parallel_size") or (tp if num_experts else 1))
    dp = world_size // (tp * pp * cp)
    edp = world_size // (etp * ep * pp)
    instances = int(get("num_distributed_optimizer_instances") or 1)
    gated = bool(get("swiglu"))
    ffn = get("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    pattern = get("hybrid_layer_pattern")
    rank = pp - 1 if pp_rank is None else pp_rank
    chunks, mtp = _hybrid_chunks(str(pattern), pp, rank) if pattern else _gpt_chunks(arguments, pp, rank)
    muon = "muon" in str(get("optimizer", "adam"))
    backend = get("attention_backend", "auto")
    position = get("position_embedding_type", "learned_absolute")
    head_dim = int(get("kv_channels") or hidden // heads)
    fused_ce = bool(get("cross_entropy_loss_fusion"))
    local = get("transformer_impl") == "local"
    aware = bool(get("use_precision_aware_optimizer"))
    halved = bool(get("grad_reduce_in_bf16")) or (bool(get("fp16")) and not get("accumulate_allreduce_grads_in_fp32"))
    device = platform.removeprefix("dgx_")
    micro_batch = int(get("micro_batch_size") or 1)
    return MegatronJob(
        hidden_size=hidden,
        num_heads=heads,
        num_query_groups=int(get("num_query_groups") or 1) if get("group_query_attention") else heads,
        head_dim=head_dim,
        ffn_hidden_size=int(ffn),
        vocab_size=vocab_size,
        seq_length=int(get("seq_length", 0)),
        micro_batch_size=micro_batch,
        num_microbatches=int(get("global_batch_size") or micro_batch * dp) // (micro_batch * dp),
        chunks=chunks,
        mtp_operators=mtp,
        mtp_repeated=bool(get("mtp_use_repeated_layer")),
        tied=not get("untie_embeddings_and_output_weights"),
        gated=gated,
        bias=not get("disable_bias_linear"),
        rms_norm=get("normalization") == "RMSNorm",
        hybrid=bool(pattern),
        learned_positions=int(get("max_position_embeddings", 0)) if position == "learned_absolute" else 0,
        hidden_dropout=float(get("hidden_dropout", 0.1)) > 0,
        attention_dropout=float(get("attention_dropout", 0.1)) > 0,
        latent=_latent(arguments),
        moe=_moe(arguments, int(ffn)),
        mamba=_mamba(arguments, hidden) if pattern else None,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        data_parallel=max(1, dp * cp // instances),
        expert_data_parallel=max(1, edp // instances),
        inflight_group=int(get("microbatch_group_size_per_virtual_pipeline_stage") or pp),
        sequence_parallel=bool(get("sequence_parallel")) and tp > 1,
        distributed_optimizer=bool(get("use_distributed_optimizer")),
        optimizer="muon" if muon else "adam",
        gradient_bytes=2 if halved else 4,
        persistent_grad_shard=halved and not aware,
        fp8=bool(get("fp8_format")),
        fp8_params=bool(get("fp8_param_gather")),
        attention_backend="unfused" if local else backend if backend in ("unfused", "flash", "fused") else "flash",
        cross_entropy=("te" if get("cross_entropy_fusion_impl") == "te" else "native") if fused_ce else "unfused",
        wgrad_fusion=not get("no_gradient_accumulation_fusion"),
        attention_mask=not get("no_create_attention_mask_in_dataloader"),
        recompute=_recompute(arguments),
        tp_comm_overlap=bool(get("tp_comm_overlap")),
        workspace_bytes=engine_bytes(device),
        bias_activation_fusion=bool(get("use_fused_weighted_squared_relu")),
        pp_rank=pp_rank,
        master_bytes=2 if aware else 4,  # the upper 16 bits are the bf16 parameter's
        moment_bytes=MOMENT_BYTES.get(str(get("exp_avg_dtype")), 4) if aware else 4,
        cublas_bytes=cublas_bytes(device, (environment or {}).get("CUBLAS_WORKSPACE_CONFIG"), month),
        qk_norm=bool(get("qk_layernorm")),
        local=local,
        rotary_dim=int(head_dim * float(get("rotary_percent") or 1.0)) if position == "rope" else 0,
        fsdp=bool(get("use_megatron_fsdp")),
    )


def _latent(arguments: Mapping[str, Any]) -> LatentDims | None:
    if not arguments.get("multi_latent_attention"):
        return None
    return LatentDims(
        arguments.get("q_lora_rank"),
        int(arguments.get("kv_lora_rank", 32)),
        int(arguments.get("qk_head_dim", 128)),
        int(arguments.get("qk_pos_emb_head_dim", 64)),
        int(arguments.get("v_head_dim", 128)),
        normed=bool(arguments.get("qk_layernorm")),
    )


def _moe(arguments: Mapping[str, Any], ffn: int) -> MoeDims | None:
    get = arguments.get
    if not get("num_experts"):
        return None
    kinds: dict[str, Dispatcher] = {"alltoall": "alltoall", "deepep": "deepep", "hybridep": "hybridep"}
    factor = get("moe_expert_capacity_factor")
    return MoeDims(
        int(get("num_experts", 0)),
        int(get("moe_router_topk") or 2),
        int(get("moe_ffn_hidden_size") or ffn),
        int(get("moe_shared_expert_intermediate_size") or 0),
        kinds.get(flex_backend(arguments) or str(get("moe_token_dispatcher_type")), "allgather"),
        bool(get("moe_grouped_gemm")),
        bool(get("overlap_moe_expert_parallel_comm")),
        capacity_factor=None if factor is None else float(factor),
        combine_kept=bool(get("deterministic_mode")) and not get("moe_permute_fusion") and not get("overlap_moe_expert_parallel_comm"),
        probability_bytes={"fp32": 4, "fp64": 8}.get(str(get("moe_router_dtype")), 2),
        permute_fusion=bool(get("moe_permute_fusion")),
    )


def _mamba(arguments: Mapping[str, Any], hidden: int) -> MambaDims:
    get = arguments.get
    head_dim = int(get("mamba_head_dim") or 64)
    return MambaDims(
        int(get("mamba_num_heads") or 2 * hidden // head_dim),
        head_dim,
        int(get("mamba_state_dim") or 128),
        int(get("mamba_num_groups") or 8),
    )


def _recompute(arguments: Mapping[str, Any]) -> frozenset[str]:
    if arguments.get("recompute_granularity") != "selective":
        return frozenset()
    modules = arguments.get("recompute_modules") or "core_attn"
    text = " ".join(modules) if isinstance(modules, list | tuple) else str(modules)
    return frozenset(re.findall(r"[a-z_]+", text))


def _hybrid_chunks(text: str, pp: int, rank: int) -> tuple[tuple[str, ...], str]:
    pattern = parse_hybrid(text)
    return _ends(list(pattern.stages(pp)[rank::pp]), pp, rank, pattern.num_modules), pattern.module or ""


def _gpt_chunks(arguments: Mapping[str, Any], pp: int, rank: int) -> tuple[tuple[str, ...], str]:
    get = arguments.get
    layers = int(get("num_layers", 0))
    kinds = layer_kinds(get("moe_layer_freq") or 1, layers, bool(get("num_experts")))
    layout = get("pipeline_model_parallel_layout")
    sizes = [stage.count("t") for stage in parse_layout(str(layout))] if layout else even_sizes(arguments, layers, pp)
    stages, start = [], 0
    for size in sizes:
        stages.append("".join("*" + kind for kind in kinds[start : start + size]))
        start += size
    return _ends(stages[rank::pp], pp, rank, int(get("mtp_num_layers") or 0)), "*" + kinds[-1]


def _ends(own: list[str], pp: int, rank: int, num_modules: int) -> tuple[str, ...]:
    """A rank's chunks with what stands before the first layer and after the last."""
    if rank == 0:
        own[0] = EMBEDDING + own[0]
    if rank == pp - 1:
        own[-1] += MTP * num_modules + LOSS
    return tuple(own)


def layer_kinds(frequency: Any, layers: int, moe: bool) -> str:
    """One letter a layer of a GPT model, `E` or `-`, by `--moe-layer-freq`: a period, or a list of flags written as Python sums."""
    if not moe:
        return "-" * layers
    if isinstance(frequency, int) or str(frequency).isdigit():
        return "".join("E" if index % int(frequency) == 0 else "-" for index in range(layers))
    flags = "".join("01"[int(bit)] * int(times or 1) for bit, times in re.findall(r"\[([01])\](?:\*(\d+))?", str(frequency)))
    return flags.replace("0", "-").replace("1", "E")


def even_sizes(arguments: Mapping[str, Any], layers: int, pp: int) -> list[int]:
    """Layers of each virtual stage of a GPT model without a layout, in model order."""
    get = arguments.get
    per = get("num_layers_per_virtual_pipeline_stage")
    first, last = get("decoder_first_pipeline_num_layers"), get("decoder_last_pipeline_num_layers")
    ends = bool(get("account_for_embedding_in_pipeline_split")), bool(get("account_for_loss_in_pipeline_split"))
    counted = layers + sum(ends)
    ranks = [0] * pp
    free = counted - (first or 0) - (last or 0)
    between = pp - bool(first) - bool(last)
    for rank in range(pp):
        ranks[rank] = free // between
    if first:
        ranks[0] = int(first)
    if last:
        ranks[-1] = int(last)
    virtual = int(get("num_virtual_stages_per_pipeline_rank") or (counted // pp // int(per) if per and not first else 0))
    if per and first:
        virtual = ranks[1] // int(per)
    virtual = virtual or 1
    sizes = [ranks[rank] // virtual for _ in range(virtual) for rank in range(pp)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return sizes
