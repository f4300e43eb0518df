"""The run of one pipeline rank, from a spec and its cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaplan.dtypes import DType
from megaplan.families.linear_attention.section import GatedDeltaNet
from megaplan.hosts.megatron.argument import value_at
from megaplan.hosts.megatron.job import (
    EMBEDDING,
    IN_SIXTEEN_BIT,
    LOSS,
    MTP,
    DeltaDims,
    Dispatcher,
    LatentDims,
    LowPrecisionRun,
    MambaDims,
    MegatronJob,
    MoeDims,
)
from megaplan.hosts.megatron.pattern import LETTERS
from megaplan.hosts.megatron.storage import FSDP_UNIT_ELEMENTS
from megaplan.hosts.megatron.vocabulary import job_fields
from megaplan.hosts.megatron.workspaces import engine_bytes
from megaplan.layout.values import Layout
from megaplan.low_precision import Recipe
from megaplan.spec.device import device_of
from megaplan.spec.host import Host
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Mamba2, Spec


def jobs_from_spec(spec: Spec, letters: str, layout: Layout, pp_ranks: Sequence[int] | None = None) -> tuple[MegatronJob, ...]:
    """One run a pipeline rank, of the first of its data ranks.

    Args:
        spec: A checked spec whose host is Megatron-Core.
        letters: One a layer.
        layout: Its slots.
        pp_ranks: Of which ranks; None for all.
    """
    common, depth = common_job(spec, letters), spec.model.features.mtp.depth if spec.model.features.mtp is not None else 0
    last = len(layout.slots) - 1
    jobs = []
    for rank in range(layout.pp) if pp_ranks is None else pp_ranks:
        chunks = []
        for slot in layout.of_rank(rank):
            own = "".join(operator_letter(spec, letters, layer) for layer in range(slot.start, slot.stop))
            chunks.append(EMBEDDING * (slot.index == 0) + own + (MTP * depth + LOSS) * (slot.index == last))
        jobs.append(common.of_rank(tuple(chunks), rank))
    return tuple(jobs)


def operator_letter(spec: Spec, letters: str, layer: int) -> str:
    """The letter of a layer's operator, that of 16 bits where a low-precision recipe leaves the layer out."""
    own, recipe = LETTERS[letters[layer]], spec.precision.recipe
    return own if recipe is None or recipe.covers(letters[layer], layer, len(letters)) else IN_SIXTEEN_BIT[own]


def _delta(spec: Spec) -> DeltaDims | None:
    linear = spec.model.linear_attention
    if not isinstance(linear, GatedDeltaNet):
        return None
    return DeltaDims(linear.num_key_heads, linear.num_value_heads, linear.key_dim, linear.value_dim, linear.conv_kernel)


GRAPHED = {"attn": "*", "mamba": "M", "mlp": "-", "moe": "E", "moe_router": "", "moe_preprocess": ""}
"""Operators that a graph of each module holds whole; the router's scratch is not counted."""


def _graphs(host: Host) -> frozenset[str]:
    if host.cuda_graphs != "layers":
        return frozenset()
    return frozenset("".join(GRAPHED[module] for module in host.cuda_graph_modules or GRAPHED))


def _low(spec: Spec) -> LowPrecisionRun | None:
    given = spec.precision.recipe
    if given is None:
        return None
    recipe = Recipe(given.name, device_of(spec.device).generation)
    return LowPrecisionRun(recipe, given.param_gather, given.head, given.amax_history)


def _ahead(spec: Spec) -> str:
    """Operators of a prediction module."""
    mtp, recipe = spec.model.features.mtp, spec.precision.recipe
    own = "".join(LETTERS[letter] for letter in mtp.letters) if mtp is not None else ""
    return own if recipe is None or recipe.prediction else "".join(IN_SIXTEEN_BIT[letter] for letter in own)


def common_job(spec: Spec, letters: str) -> MegatronJob:
    """What the runs of all pipeline ranks share; without chunks."""
    model, mesh, host, precision = spec.model, spec.mesh, spec.host, spec.precision
    attention = model.attention
    grouped = attention if isinstance(attention, GroupedQueryAttention) else None
    mtp = model.features.mtp
    ffn = model.mlp.ffn_hidden_size if model.mlp else mtp.ffn_hidden_size if mtp else 4 * model.hidden_size
    activation = next((part.activation for part in (model.mlp, model.moe, mtp) if part is not None), "gelu")
    modules = set[str](host.recompute_modules)
    if spec.recompute.of("A") == "selective":
        modules.add("core_attn")
    heads = attention.num_heads if attention is not None else 1
    return MegatronJob(
        **_priced(spec),
        num_heads=heads,
        num_query_groups=grouped.num_kv_heads if grouped else heads,
        head_dim=grouped.head_dim if grouped else model.hidden_size // heads,
        ffn_hidden_size=ffn,
        num_microbatches=spec.schedule.microbatches_per_update,
        chunks=(),
        mtp_operators=_ahead(spec),
        gated=activation == "swiglu",
        bias=_has_biases(spec),
        hybrid=host.model == "hybrid",
        learned_positions=model.learned_positions or 0,
        latent=LatentDims(**_priced(spec, "latent"), normed=attention.latent_norm) if isinstance(attention, LatentAttention) else None,
        moe=_moe(spec),
        mamba=_mamba(spec),
        data_parallel=mesh.dp_shard * mesh.cp,
        expert_data_parallel=mesh.efsdp,
        inflight_group=host.microbatch_group_size or mesh.pp,
        persistent_grad_shard=precision.grads is not DType.FP32 and not host.precision_aware_optimizer,
        sequence_parallel=host.sequence_parallel and mesh.tp > 1,
        recompute=frozenset(modules),
        workspace_bytes=engine_bytes(spec.device.name),
        cublas_bytes=_cublas_bytes(spec),
        rotary_dim=_rotary_dim(spec, letters),
        low=_low(spec),
        sinks=grouped is not None and grouped.sinks,
        delta=_delta(spec),
        output_gate=grouped is not None and grouped.gate,
        shared_gate=model.moe is not None and model.moe.shared_gate,
        **_switched(host),
    )


def _switched(host: Host) -> dict[str, Any]:
    """Graphs, recompute of layers, and what is on the host or gathered in units."""
    operators = 2 if host.model == "gpt" else 1
    return {
        "recompute_num_layers": (host.recompute_num_layers or 0) * operators,
        "recompute_block": host.recompute_method == "block",
        "graphs": _graphs(host),
        "offloaded": frozenset(host.offload_modules),
        "offloaded_operators": (host.offloaded_layers or 0) * operators,
        "deferred_head": host.deferred_head_microbatches or 0,
        "fsdp_unit": host.fsdp_unit_elements or FSDP_UNIT_ELEMENTS,
        "fsdp_double_buffer": host.fsdp_double_buffer,
    }


def _has_biases(spec: Spec) -> bool:
    """Whether linears have biases: all have, or none has."""
    model = spec.model
    parts = [part for part in (model.mlp, model.moe, model.features.mtp) if part is not None]
    return any(part.bias for part in parts) or (model.attention is not None and model.attention.output_bias)


def _priced(spec: Spec, part: str = "") -> dict[str, Any]:
    """The fields whose value one key of the spec decides."""
    return job_fields(lambda row: value_at(spec, row.key), part)


def _cublas_bytes(spec: Spec) -> int:
    """What the launch sets, or torch's default on the device, whose record counts the two handles together."""
    if spec.host.cublas_workspace_kib is not None:
        return spec.host.cublas_workspace_kib * 1024
    return device_of(spec.device).gemm_workspace_bytes // 2


def _rotary_dim(spec: Spec, letters: str) -> int:
    """Of a head, where any attention layer turns its queries and keys."""
    attention = spec.model.attention
    if not isinstance(attention, GroupedQueryAttention):
        return 0
    return (attention.rotary_dim or attention.head_dim) if len(attention.nope_layers) < letters.count("A") else 0


def _moe(spec: Spec) -> MoeDims | None:
    moe, host = spec.model.moe, spec.host
    if moe is None:
        return None
    return MoeDims(
        **_priced(spec, "moe"),
        dispatcher=_dispatcher(spec),
        routing_skew=moe.routing_skew,
        latent=moe.latent_size,
        rank_capacity=host.moe_rank_capacity,
        stash=host.moe_paged_stash,
        combine_kept=host.deterministic_mode and not host.moe_permute_fusion and not host.moe_overlap,
    )


def _dispatcher(spec: Spec) -> Dispatcher:
    host = spec.host
    return host.moe_flex_backend if host.moe_dispatcher == "flex" else host.moe_dispatcher


def _mamba(spec: Spec) -> MambaDims | None:
    mamba = spec.model.mamba
    if not isinstance(mamba, Mamba2):
        return None
    heads = mamba.num_heads or mamba.expand * spec.model.hidden_size // mamba.head_dim
    return MambaDims(**_priced(spec, "mamba"), num_heads=heads, conv_kernel=mamba.conv_kernel)
