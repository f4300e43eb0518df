"""The run of one pipeline rank, from a spec and its cuts."""

from __future__ import annotations

from dataclasses import replace

from megaplan.dtypes import DType
from megaplan.hosts.megatron.job import EMBEDDING, LOSS, MTP, Dispatcher, LatentDims, MambaDims, MegatronJob, MoeDims
from megaplan.hosts.megatron.workspaces import engine_bytes
from megaplan.layout.values import Layout
from megaplan.spec.device import device_of
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Mamba2, Spec

LETTERS = {"A": "*", "M": "M", "E": "E", "D": "-"}
"""Megatron's letter of each of ours that it has."""


def jobs_from_spec(spec: Spec, letters: str, layout: Layout) -> tuple[MegatronJob, ...]:
    """One run a pipeline rank, of the first of its data ranks.

    Args:
        spec: A checked spec whose host is Megatron-Core.
        letters: One a layer.
        layout: Its slots.
    """
    common, depth = _common(spec, letters), spec.model.features.mtp.depth if spec.model.features.mtp is not None else 0
    last = len(layout.slots) - 1
    jobs = []
    for rank in range(layout.pp):
        chunks = []
        for slot in layout.of_rank(rank):
            own = "".join(LETTERS[letter] for letter in letters[slot.start : slot.stop])
            chunks.append(EMBEDDING * (slot.index == 0) + own + (MTP * depth + LOSS) * (slot.index == last))
        jobs.append(replace(common, chunks=tuple(chunks), pp_rank=rank))
    return tuple(jobs)


def _common(spec: Spec, letters: str) -> MegatronJob:
    model, mesh, host, precision = spec.model, spec.mesh, spec.host, spec.precision
    attention = model.attention
    grouped = attention if isinstance(attention, GroupedQueryAttention) else None
    ffn = model.mlp.ffn_hidden_size if model.mlp else model.features.mtp.ffn_hidden_size if model.features.mtp else 4 * model.hidden_size
    activation = next((part.activation for part in (model.mlp, model.moe) if part is not None), "relu2")
    modules = set[str](host.recompute_modules)
    if spec.recompute.of("A") == "selective":
        modules.add("core_attn")
    aware, bf16_grads = host.precision_aware_optimizer, precision.grads is DType.BF16
    heads = attention.num_heads if attention is not None else 1
    return MegatronJob(
        hidden_size=model.hidden_size,
        num_heads=heads,
        num_query_groups=grouped.num_kv_heads if grouped else heads,
        head_dim=grouped.head_dim if grouped else model.hidden_size // heads,
        ffn_hidden_size=ffn,
        vocab_size=model.vocab_size,
        seq_length=spec.batch.seq_length,
        micro_batch_size=spec.batch.micro_batch_size,
        num_microbatches=spec.schedule.microbatches_per_update,
        chunks=(),
        mtp_operators="*-",
        mtp_repeated=host.mtp_repeated,
        tied=model.tie_embeddings,
        gated=activation == "swiglu",
        bias=False,
        rms_norm=True,
        hybrid=host.model == "hybrid",
        learned_positions=0,
        hidden_dropout=host.hidden_dropout > 0,
        attention_dropout=host.attention_dropout > 0,
        latent=_latent(spec),
        moe=_moe(spec),
        mamba=_mamba(spec),
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        ep=mesh.ep,
        etp=mesh.etp,
        data_parallel=mesh.dp_shard * mesh.cp,
        expert_data_parallel=mesh.efsdp,
        inflight_group=host.microbatch_group_size or mesh.pp,
        sequence_parallel=mesh.tp > 1,
        distributed_optimizer=host.distributed_optimizer,
        optimizer="muon" if spec.optimizer.matrix == "muon" else "adam",
        gradient_bytes=precision.grads.bytes,
        persistent_grad_shard=bf16_grads and not aware,
        fp8=False,
        fp8_params=False,
        attention_backend=host.attention_backend,
        cross_entropy=host.cross_entropy,
        wgrad_fusion=host.wgrad_fusion,
        attention_mask=host.attention_mask,
        recompute=frozenset(modules),
        tp_comm_overlap=host.tp_comm_overlap,
        workspace_bytes=engine_bytes(spec.device.name),
        bias_activation_fusion=host.fused_squared_relu,
        cublas_bytes=_cublas_bytes(spec),
        master_bytes=2 if aware else 4,  # the upper 16 bits are the bf16 parameter's
        moment_bytes=precision.moments.bytes,
        qk_norm=grouped is not None and grouped.qk_norm,
        qkv_bias=grouped is not None and grouped.bias,
        rotary_dim=_rotary_dim(spec, letters),
        fsdp=spec.sharding.reshard_after_forward,
        recompute_num_layers=(host.recompute_num_layers or 0) * (2 if host.model == "gpt" else 1),
    )


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
    return attention.head_dim if len(attention.nope_layers) < letters.count("A") else 0


def _latent(spec: Spec) -> LatentDims | None:
    attention = spec.model.attention
    if not isinstance(attention, LatentAttention):
        return None
    return LatentDims(
        attention.q_lora_rank, attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    )


def _moe(spec: Spec) -> MoeDims | None:
    moe, host = spec.model.moe, spec.host
    if moe is None:
        return None
    return MoeDims(
        moe.num_experts,
        moe.top_k,
        moe.ffn_hidden_size,
        moe.shared_ffn_hidden_size,
        _dispatcher(spec),
        host.moe_grouped_gemm,
        host.moe_overlap,
        moe.routing_skew,
        moe.capacity_factor,
        combine_kept=host.deterministic_mode and not host.moe_permute_fusion and not host.moe_overlap,
        permute_fusion=host.moe_permute_fusion,
    )


def _dispatcher(spec: Spec) -> Dispatcher:
    host = spec.host
    return host.moe_flex_backend if host.moe_dispatcher == "flex" else host.moe_dispatcher


def _mamba(spec: Spec) -> MambaDims | None:
    mamba = spec.model.mamba
    if not isinstance(mamba, Mamba2):
        return None
    heads = mamba.num_heads or mamba.expand * spec.model.hidden_size // mamba.head_dim
    return MambaDims(heads, mamba.head_dim, mamba.state_dim, mamba.num_groups, mamba.conv_kernel)
