"""A MaxText configuration: dimensions, the XLA mesh by axis, and the logical axes that shard over it.

Source: the published schema of `maxtext/configs/base.yml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from megaplan.exporters.modules import TORCH_DTYPES
from megaplan.exporters.transformers import transformer_layers, uneven_stages
from megaplan.exporters.values import Exported, Loss, Source, complete
from megaplan.spec.models import GroupedQueryAttention, Spec
from megaplan.spec.training import ConstantRate, StableRate, warm_up_steps

CARRIED = frozenset({
    "model.hidden_size", "model.vocab_size", "model.tie_embeddings", "model.norm_eps", "model.attention.kind",
    "model.attention.num_heads", "model.attention.num_kv_heads", "model.attention.head_dim", "model.attention.rope_theta",
    "model.attention.qk_norm", "model.mlp.ffn_hidden_size", "model.mlp.activation",
        "model.moe.num_experts", "model.moe.top_k", "model.moe.ffn_hidden_size",
    "model.moe.activation", "model.moe.capacity_factor", "model.moe.balance_loss_coefficient", "model.moe.normalize_top_k",
    "mesh.pp", "mesh.vpp", "mesh.dp_replicate", "mesh.dp_shard", "mesh.cp", "mesh.tp", "mesh.ep", "schedule", "batch",
    "precision.params", "precision.master", "precision.grads", "precision.moments", "sharding", "optimizer.matrix",
    "optimizer.other", "recompute", "training.steps", "training.seed", "training.learning_rate", "training.weight_decay",
    "training.gradient_clip", "training.rate_schedule", "mesh.vocab_parallel", "model.attention.bias",
    "model.attention.window_size",
})  # fmt: skip
ACTIVATIONS = {"swiglu": ["silu", "linear"], "gelu": ["gelu"]}


def export_maxtext(source: Source) -> Exported:
    """YAML.

    Raises:
        MegaplanError: MP921, the model is no transformer of one kind of block.
    """
    layers = transformer_layers(source, "MaxText", ("AD", "AE"))
    spec = source.spec
    model, mesh, training = spec.model, spec.mesh, spec.training
    attention, part = model.attention, model.mlp or model.moe
    assert isinstance(attention, GroupedQueryAttention)
    assert part is not None
    sizes = [slot.stop - slot.start for slot in source.slots()]
    document: dict[str, Any] = {
        "run_name": spec.name,
        "decoder_block": "mixtral" if model.moe is not None else "llama2",
        "base_emb_dim": model.hidden_size,
        "base_num_decoder_layers": layers,
        "base_num_query_heads": attention.num_heads,
        "base_num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "use_qk_norm": attention.qk_norm,
        "attention_bias": attention.bias,
        "attention_type": "global" if attention.window_size is None else "local_sliding",
        "sliding_window_size": attention.window_size or 0,
        "base_mlp_dim": part.ffn_hidden_size,
        "mlp_activations": ACTIVATIONS.get(part.activation, ["silu", "linear"]),
        "vocab_size": model.vocab_size,
        "logits_via_embedding": model.tie_embeddings,
        "normalization_layer_epsilon": model.norm_eps,
        "rope_max_timescale": int(attention.rope_theta),
        **_experts(source),
        "mesh_axes": ["data", "stage", "fsdp", "context", "tensor", "expert"],
        "ici_data_parallelism": mesh.dp_replicate,
        "ici_pipeline_parallelism": mesh.pp,
        "ici_fsdp_parallelism": mesh.dp_shard // mesh.ep if mesh.dp_shard % mesh.ep == 0 else mesh.dp_shard,
        "ici_context_parallelism": mesh.cp,
        "ici_tensor_parallelism": mesh.tp,
        "ici_expert_parallelism": mesh.ep,
        "logical_axis_rules": [
            ["activation_batch", ["data", "fsdp", "expert"]],
            ["activation_length", ["context"]],
            ["activation_stage", "stage"],
            ["embed", ["fsdp"]],
            ["heads", ["tensor"]],
            ["kv_heads", ["tensor"]],
            ["mlp", ["tensor"]],
            ["vocab", ["tensor"]],
            ["exp", "expert"],
            ["layers", "stage"],
        ],
        "per_device_batch_size": spec.batch.micro_batch_size * mesh.data_ranks * spec.schedule.num_microbatches / mesh.world_size,
        "gradient_accumulation_steps": spec.schedule.steps_per_update,
        "max_target_length": spec.batch.seq_length,
        "dtype": TORCH_DTYPES[str(spec.precision.params)],
        "weight_dtype": TORCH_DTYPES[str(spec.precision.master)],
        "grad_dtype": TORCH_DTYPES[str(spec.precision.grads)],
        "mu_dtype": TORCH_DTYPES[str(spec.precision.moments)],
        "remat_policy": "full" if {source.spec.recompute.of(letter) for letter in source.letters} == {"full"} else "minimal",
        "opt_type": "muon" if spec.optimizer.matrix == "muon" else "adamw",
        "learning_rate": training.learning_rate,
        "adam_weight_decay": training.weight_decay,
        "gradient_clipping_threshold": training.gradient_clip if training.gradient_clip is not None else 0.0,
        "steps": training.steps,
        "data_shuffle_seed": training.seed,
        "init_weights_seed": training.seed,
        **_rate(source),
    }
    if mesh.pp > 1:
        document |= {"num_layers_per_pipeline_stage": sizes[0] // 2, "num_pipeline_microbatches": spec.schedule.num_microbatches}
    return complete(source, yaml.safe_dump(document, sort_keys=False), CARRIED, _losses(source))


def _experts(source: Source) -> dict[str, Any]:
    moe = source.spec.model.moe
    if moe is None:
        return {}
    return {
        "base_moe_mlp_dim": moe.ffn_hidden_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize_top_k,
        "capacity_factor": -1.0 if moe.capacity_factor is None else moe.capacity_factor,
        "load_balance_loss_weight": moe.balance_loss_coefficient,
    }


def _rate(source: Source) -> dict[str, Any]:
    """A constant rate as a cosine that ends at its first value."""
    training = source.spec.training
    rate = training.rate_schedule
    found: dict[str, Any] = {
        "learning_rate_schedule_steps": training.steps,
        "warmup_steps_fraction": warm_up_steps(rate, training.steps) / training.steps,
        "lr_schedule_type": "wsd" if isinstance(rate, StableRate) else "cosine",
        "learning_rate_final_fraction": 1.0 if isinstance(rate, ConstantRate) else rate.final_fraction,
    }
    if isinstance(rate, StableRate):
        found |= {"wsd_decay_steps_fraction": rate.decay_steps / training.steps, "wsd_decay_style": "linear"}
    return found


def _losses(source: Source) -> list[Loss]:
    spec = source.spec
    mesh, found = spec.mesh, uneven_stages(source, "MaxText")
    part = spec.model.mlp or spec.model.moe
    assert part is not None
    if part.activation not in ACTIVATIONS:
        key = "model.mlp.activation" if spec.model.mlp is not None else "model.moe.activation"
        found.append(Loss(key, f"{key} = {part.activation}: MaxText has silu and gelu", "activation: swiglu"))
    if mesh.pp > 1 and spec.schedule.kind not in ("gpipe", "interleaved_1f1b"):
        detail = f"schedule.kind = {spec.schedule.kind}: MaxText's pipeline is a circular one whose backward XLA derives"
        found.append(Loss("schedule.kind", detail, "schedule: {kind: gpipe}"))
    if mesh.dp_shard % mesh.ep:
        found.append(Loss("mesh.ep", f"mesh.ep = {mesh.ep}, mesh.dp_shard = {mesh.dp_shard}: MaxText's expert axis is one of its own"))
    if mesh.tp > 1 and not mesh.vocab_parallel:
        found.append(Loss("mesh.vocab_parallel", "mesh.vocab_parallel = false: vocab shards over tensor", "vocab_parallel: true"))
    if spec.optimizer.matrix == "muon":
        found.append(Loss("optimizer.matrix", "optimizer.matrix = muon: MaxText's muon chooses its matrices itself", "matrix: adamw"))
    policies = {source.spec.recompute.of(letter) for letter in source.letters}
    if policies != {"full"}:
        said = ", ".join(f"{letter}: {source.spec.recompute.of(letter)}" for letter in sorted(set(source.letters)))
        found.append(
            Loss("recompute", f"recompute is {said}: XLA's nearest policy is minimal, which saves matrix products", "default: full")
        )
    found += _sharding(spec)
    rate = spec.training.rate_schedule
    if isinstance(rate, StableRate) and rate.decay == "sqrt":
        found.append(Loss("training.rate_schedule.decay", "training.rate_schedule.decay = sqrt: MaxText decays linearly", "decay: linear"))
    if spec.model.attention is not None and not spec.model.attention.rope_theta.is_integer():
        found.append(Loss("model.attention.rope_theta", f"model.attention.rope_theta = {spec.model.attention.rope_theta} is written whole"))
    return found


def _sharding(spec: Spec) -> Iterator[Loss]:
    degree = spec.mesh.dp_shard
    if spec.sharding.copies and degree > 1:
        detail = f"sharding.mode = ddp, mesh.dp_shard = {degree}: it is written as ici_fsdp_parallelism, which shards"
        yield Loss("sharding.mode", detail, "mesh: {dp_shard: 1}, with as many dp_replicate")
    elif spec.sharding.reshard_after_forward is False and degree > 1:
        detail = "sharding.reshard_after_forward = false: XLA decides when gathered parameters are freed"
        yield Loss("sharding.reshard_after_forward", detail)
