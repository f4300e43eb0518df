"""A run from Megatron's launch arguments, with the defaults of its argument parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megaplan.hosts.megatron.argument import Argument, Kind
from megaplan.hosts.megatron.job import EMBEDDING, LOSS, MTP, Dispatcher, LatentDims, MambaDims, MegatronJob, MoeDims
from megaplan.hosts.megatron.pattern import parse_hybrid
from megaplan.hosts.megatron.stages import even_sizes, layer_kinds, parse_layout
from megaplan.hosts.megatron.vocabulary import ARGUMENTS, FEATURES, job_fields, other_fsdp
from megaplan.hosts.megatron.workspaces import cublas_bytes, engine_bytes

UNMODELLED = (*FEATURES, ARGUMENTS["flextron"])
"""Arguments whose tensors are not modelled."""
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


def refusals(arguments: Mapping[str, Any], world_size: int | None = None) -> tuple[str, ...]:
    """Why the run cannot be priced; empty if it can.

    Args:
        arguments: Launch arguments, underscores for dashes.
        world_size: GPUs; None where they are not known.
    """
    found = [f"{row.name}: {row.note}" for row in UNMODELLED if arguments.get(row.name) not in (None, False, "none")]
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
    return [f"use_megatron_fsdp with {each}" for each in (*found, *other_fsdp(arguments.get))]


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
    pattern = arguments.get("hybrid_layer_pattern")
    _, pp, _ = degrees(arguments)
    rank = pp - 1 if pp_rank is None else pp_rank
    chunks, mtp = _hybrid_chunks(str(pattern), pp, rank) if pattern else _gpt_chunks(arguments, pp, rank)
    fields: dict[str, Any] = {
        **_direct(arguments),
        **_widths(arguments),
        **_ranks(arguments, world_size),
        **_state(arguments),
        **_attention(arguments),
        **_workspaces(platform.removeprefix("dgx_"), environment or {}, month),
    }
    fields["moe"] = _moe(arguments, fields["ffn_hidden_size"])
    fields["mamba"] = _mamba(arguments) if pattern else None
    return MegatronJob(**fields, chunks=chunks, mtp_operators=mtp, hybrid=bool(pattern), vocab_size=vocab_size, pp_rank=pp_rank)


def _direct(arguments: Mapping[str, Any], part: str = "") -> dict[str, Any]:
    """The fields that one argument each decides, by the table."""

    def value_of(row: Argument) -> Any:
        found = arguments.get(row.name)
        found = row.default if found is None else found
        return row.conversion.read(int(found) if row.kind is Kind.COUNT and found is not None else found)

    return job_fields(value_of, part, direct_only=True)


def _widths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    get = arguments.get
    hidden, heads, gated = int(arguments["hidden_size"]), int(get("num_attention_heads", 0)), bool(get("swiglu"))
    head_dim = int(get("kv_channels") or hidden // heads)
    position = get("position_embedding_type", "learned_absolute")
    return {
        "num_heads": heads,
        "num_query_groups": int(get("num_query_groups") or 1) if get("group_query_attention") else heads,
        "head_dim": head_dim,
        "ffn_hidden_size": int(get("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)),
        "gated": gated,
        "bias": not get("disable_bias_linear"),
        "rms_norm": get("normalization") == "RMSNorm",
        "learned_positions": int(get("max_position_embeddings", 0)) if position == "learned_absolute" else 0,
        "rotary_dim": int(head_dim * float(get("rotary_percent") or 1.0)) if position == "rope" else 0,
    }


def _ranks(arguments: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    get = arguments.get
    tp, pp, cp = degrees(arguments)
    etp = int(get("expert_tensor_parallel_size") or (tp if get("num_experts") else 1))
    dp, edp = world_size // (tp * pp * cp), world_size // (etp * int(get("expert_model_parallel_size") or 1) * pp)
    instances, size = int(get("num_distributed_optimizer_instances") or 1), int(get("micro_batch_size") or 1)
    return {
        "etp": etp,
        "data_parallel": max(1, dp * cp // instances),
        "expert_data_parallel": max(1, edp // instances),
        "num_microbatches": int(get("global_batch_size") or size * dp) // (size * dp),
        "inflight_group": int(get("microbatch_group_size_per_virtual_pipeline_stage") or pp),
        "sequence_parallel": bool(get("sequence_parallel")) and tp > 1,
    }


def _state(arguments: Mapping[str, Any]) -> dict[str, Any]:
    get = arguments.get
    aware = bool(get("use_precision_aware_optimizer"))
    halved = bool(get("grad_reduce_in_bf16")) or (bool(get("fp16")) and not get("accumulate_allreduce_grads_in_fp32"))
    return {
        "gradient_bytes": 2 if halved else 4,
        "persistent_grad_shard": halved and not aware,
        "moment_bytes": MOMENT_BYTES.get(str(get("exp_avg_dtype")), 4) if aware else 4,
        "fsdp": bool(get("use_megatron_fsdp")),
        "fp8": bool(get("fp8_format")),
        "fp8_params": bool(get("fp8_param_gather")),
    }


def _attention(arguments: Mapping[str, Any]) -> dict[str, Any]:
    get, local = arguments.get, arguments.get("transformer_impl") == "local"
    backend = get("attention_backend", "auto")
    fused = "te" if get("cross_entropy_fusion_impl") == "te" else "native"
    latent = _direct(arguments, "latent") | {"normed": bool(get("qk_layernorm"))}
    return {
        "attention_backend": "unfused" if local else backend if backend in ("unfused", "flash", "fused") else "flash",
        "local": local,
        "latent": LatentDims(**latent) if get("multi_latent_attention") else None,
        "cross_entropy": fused if get("cross_entropy_loss_fusion") else "unfused",
        "recompute": _recompute(arguments),
    }


def _workspaces(device: str, environment: Mapping[str, str], month: str | None) -> dict[str, Any]:
    """What libraries take, by device."""
    cublas = cublas_bytes(device, environment.get("CUBLAS_WORKSPACE_CONFIG"), month)
    return {"workspace_bytes": engine_bytes(device), "cublas_bytes": cublas}


def _moe(arguments: Mapping[str, Any], ffn: int) -> MoeDims | None:
    get = arguments.get
    if not get("num_experts"):
        return None
    kinds: dict[str, Dispatcher] = {"alltoall": "alltoall", "deepep": "deepep", "hybridep": "hybridep"}
    return MoeDims(
        **_direct(arguments, "moe"),
        ffn_hidden_size=int(get("moe_ffn_hidden_size") or ffn),
        dispatcher=kinds.get(flex_backend(arguments) or str(get("moe_token_dispatcher_type")), "allgather"),
        combine_kept=bool(get("deterministic_mode")) and not get("moe_permute_fusion") and not get("overlap_moe_expert_parallel_comm"),
        probability_bytes={"fp32": 4, "fp64": 8}.get(str(get("moe_router_dtype")), 2),
    )


def _mamba(arguments: Mapping[str, Any]) -> MambaDims:
    fields = _direct(arguments, "mamba")
    heads = arguments.get("mamba_num_heads") or 2 * int(arguments["hidden_size"]) // fields["head_dim"]
    return MambaDims(**fields, num_heads=int(heads))


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
