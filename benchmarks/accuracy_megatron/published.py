"""Megatron-LM's own estimate of a run, by its published closed forms.

Source: `megatron/training/theoretical_memory_usage.py`: weights of the fullest stage, and activations of the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaplan.hosts.megatron.job import MegatronJob


def published_bytes(job: MegatronJob, arguments: Mapping[str, Any]) -> float | None:
    """Weights, optimizer and activations; None for a hybrid, which it does not take."""
    if job.hybrid:
        return None
    return _weights(job, arguments) + _activations(job, arguments)


def _weights(job: MegatronJob, arguments: Mapping[str, Any]) -> float:
    hidden, norm = job.hidden_size, 1 if job.rms_norm else 2
    gate = 1.5 if job.gated else 1.0
    if job.latent is None:
        attention = 2.0 * hidden * job.head_dim * (job.num_heads + job.num_query_groups)
    else:
        dims = job.latent
        rank = dims.q_lora_rank or 0
        width = dims.qk_head_dim + dims.qk_pos_emb_head_dim
        attention = float(rank * (hidden + job.num_heads * width + norm) if rank else hidden * job.num_heads * width)
        attention += dims.kv_lora_rank * (hidden + job.num_heads * (dims.qk_head_dim + dims.v_head_dim) + norm)
        attention += hidden * dims.qk_pos_emb_head_dim + job.num_heads * dims.v_head_dim * hidden
    layers = int(arguments["num_layers"])
    routed = job.moe.num_experts * job.moe.ffn_hidden_size + job.moe.shared_ffn_hidden_size if job.moe else 0
    flags = _moe_layers(job, arguments, layers)
    each = [attention + 2 * hidden * ((routed if moe else job.ffn_hidden_size) * gate + norm) for moe in flags]
    depth = job.chunks[-1].count("m")
    embedding = hidden * job.vocab_size
    held = (sum(each) + norm * hidden) / job.pp + depth * each[-1] + embedding
    if not job.tied and job.pp == 1:
        held += embedding
    ranks = job.data_parallel // job.cp or 1
    return held / job.tp * (6 + 12 / ranks if job.distributed_optimizer else 18)


def _moe_layers(job: MegatronJob, arguments: Mapping[str, Any], layers: int) -> list[bool]:
    from megaplan.hosts.megatron.stages import layer_kinds  # noqa: PLC0415

    return [kind == "E" for kind in layer_kinds(arguments.get("moe_layer_freq") or 1, layers, job.moe is not None)]


def _activations(job: MegatronJob, arguments: Mapping[str, Any]) -> float:
    tokens = job.seq_length * job.micro_batch_size
    stream = tokens * job.hidden_size
    layers = int(arguments["num_layers"])
    selective = job.sequence_parallel and arguments.get("recompute_granularity") == "selective"
    factor = 18 + 4 * job.ffn_hidden_size / job.hidden_size if selective else 10 + 24 / job.tp
    total = stream * factor * layers
    total += 8 * tokens * job.pp + stream * job.pp
    virtual = len(job.chunks)
    if virtual > 1:
        total *= 1 + (job.pp - 1) / (job.pp * virtual)
    elif job.pp > 1:
        total *= min(1, job.num_microbatches / job.pp)
    if selective:
        return (total + (4 * stream * (1 + job.vocab_size / job.hidden_size) if job.pp == 1 else 0)) / job.tp
    if job.pp == 1:
        total += 2 * (tokens * job.vocab_size / job.tp + stream)
    return total * 1.05
