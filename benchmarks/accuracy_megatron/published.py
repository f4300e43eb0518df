"""Megatron-LM's own estimate of a run, by its published closed forms.

Source: `megatron/training/theoretical_memory_usage.py`: weights of the fullest stage, and activations of the first one.
"""

from collections.abc import Mapping
from typing import Any

from megaplan.families.attention.section import GroupedQueryAttention
from megaplan.hosts.megatron.run import MegatronStage
from megaplan.hosts.megatron.setting import num_statistics
from megaplan.spec.models import Spec


def published_bytes(stage: MegatronStage, arguments: Mapping[str, Any]) -> float | None:
    """Weights, optimizer and activations; None for a hybrid, which it does not take."""
    if stage.spec.host.model == "hybrid":
        return None
    return _weights(stage.spec, arguments) + _activations(stage, arguments)


def _weights(spec: Spec, arguments: Mapping[str, Any]) -> float:
    model, mesh = spec.model, spec.mesh
    hidden, norm = model.hidden_size, num_statistics(spec)
    gate = 1.5 if any(part is not None and part.activation == "swiglu" for part in (model.mlp, model.moe)) else 1.0
    dims = model.attention
    assert dims is not None
    heads = dims.num_heads
    if isinstance(dims, GroupedQueryAttention):
        attention = 2.0 * hidden * dims.head_dim * (heads + dims.num_kv_heads)
    else:
        rank, width = dims.q_lora_rank or 0, dims.qk_nope_head_dim + dims.qk_rope_head_dim
        attention = float(rank * (hidden + heads * width + norm) if rank else hidden * heads * width)
        attention += dims.kv_lora_rank * (hidden + heads * (dims.qk_nope_head_dim + dims.v_head_dim) + norm)
        attention += hidden * dims.qk_rope_head_dim + heads * dims.v_head_dim * hidden
    layers = int(arguments["num_layers"])
    routed = model.moe.num_experts * model.moe.ffn_hidden_size + model.moe.shared_ffn_hidden_size if model.moe else 0
    flags = _moe_layers(spec, arguments, layers)
    each = [attention + 2 * hidden * ((routed if moe else _ffn_hidden_size(spec)) * gate + norm) for moe in flags]
    depth = model.features.mtp.depth if model.features.mtp is not None else 0
    embedding = hidden * model.vocab_size
    held = (sum(each) + norm * hidden) / mesh.pp + depth * each[-1] + embedding
    if not model.tie_embeddings and mesh.pp == 1:
        held += embedding
    return held / mesh.tp * (6 + 12 / mesh.dp_shard if spec.host.distributed_optimizer else 18)


def _ffn_hidden_size(spec: Spec) -> int:
    section = spec.model.mlp or spec.model.features.mtp
    return section.ffn_hidden_size if section is not None else 4 * spec.model.hidden_size


def _moe_layers(spec: Spec, arguments: Mapping[str, Any], layers: int) -> list[bool]:
    from megaplan.hosts.megatron.stages import layer_kinds  # noqa: PLC0415

    return [kind == "E" for kind in layer_kinds(arguments.get("moe_layer_freq") or 1, layers, spec.model.moe is not None)]


def _activations(stage: MegatronStage, arguments: Mapping[str, Any]) -> float:
    spec, mesh, hidden = stage.spec, stage.spec.mesh, stage.spec.model.hidden_size
    tokens = spec.batch.seq_length * spec.batch.micro_batch_size
    stream = tokens * hidden
    layers = int(arguments["num_layers"])
    selective = spec.host.sequence_parallel and mesh.tp > 1 and arguments.get("recompute_granularity") == "selective"
    factor = 18 + 4 * _ffn_hidden_size(spec) / hidden if selective else 10 + 24 / mesh.tp
    total = stream * factor * layers
    total += 8 * tokens * mesh.pp + stream * mesh.pp
    virtual = len(stage.chunks)
    if virtual > 1:
        total *= 1 + (mesh.pp - 1) / (mesh.pp * virtual)
    elif mesh.pp > 1:
        total *= min(1, spec.schedule.microbatches_per_update / mesh.pp)
    if selective:
        return (total + (4 * stream * (1 + spec.model.vocab_size / hidden) if mesh.pp == 1 else 0)) / mesh.tp
    if mesh.pp == 1:
        total += 2 * (tokens * spec.model.vocab_size / mesh.tp + stream)
    return total * 1.05
