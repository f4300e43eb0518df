"""A nanotron configuration of its Llama model.

Source: `nanotron/config/config.py` of nanotron 0.4, whose loader takes no unknown key.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from megaplan.dtypes import DType
from megaplan.exporters.modules import TORCH_DTYPES
from megaplan.exporters.transformers import transformer_layers
from megaplan.exporters.values import Exported, Loss, Source, complete
from megaplan.spec.models import GroupedQueryAttention
from megaplan.spec.training import ConstantRate, StableRate, warm_up_steps

CARRIED = frozenset({
    "model.hidden_size", "model.vocab_size", "model.tie_embeddings", "model.norm_eps", "model.attention.kind",
    "model.attention.num_heads", "model.attention.num_kv_heads", "model.attention.head_dim", "model.mlp.ffn_hidden_size",
    "model.mlp.activation", "mesh.pp", "mesh.tp", "mesh.dp_replicate", "mesh.dp_shard", "mesh.vpp", "schedule", "batch",
    "precision.params", "precision.grads", "precision.master", "precision.moments", "optimizer.matrix", "optimizer.other",
    "training.steps", "training.seed", "training.learning_rate", "training.weight_decay", "training.gradient_clip",
    "training.rate_schedule", "mesh.vocab_parallel",
})  # fmt: skip


def export_nanotron(source: Source) -> Exported:
    """YAML.

    Raises:
        MegaplanError: MP921, the model is not a Llama.
    """
    layers = transformer_layers(source, "nanotron", ("AD",))
    spec = source.spec
    model, mesh, training = spec.model, spec.mesh, spec.training
    attention, mlp = model.attention, model.mlp
    assert isinstance(attention, GroupedQueryAttention)
    assert mlp is not None
    document: dict[str, Any] = {
        "general": {"project": "megaplan", "run": spec.name, "seed": training.seed},
        "parallelism": {
            "dp": source.spec.mesh.data_ranks,
            "pp": mesh.pp,
            "tp": mesh.tp,
            "expert_parallel_size": 1,
            "pp_engine": "afab" if spec.schedule.kind == "gpipe" else "1f1b",
            "tp_mode": "REDUCE_SCATTER" if mesh.tp > 1 else "ALL_REDUCE",
            "tp_linear_async_communication": mesh.tp > 1,
        },
        "model": {
            "dtype": TORCH_DTYPES[str(spec.precision.params)],
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": {
                "hidden_act": "silu",
                "hidden_size": model.hidden_size,
                "intermediate_size": mlp.ffn_hidden_size,
                "is_llama_config": True,
                "max_position_embeddings": spec.batch.seq_length,
                "num_attention_heads": attention.num_heads,
                "num_hidden_layers": layers,
                "num_key_value_heads": attention.num_kv_heads,
                "rms_norm_eps": model.norm_eps,
                "tie_word_embeddings": model.tie_embeddings,
                "vocab_size": model.vocab_size,
            },
        },
        "tokenizer": {"tokenizer_name_or_path": None},
        "tokens": {
            "sequence_length": spec.batch.seq_length,
            "train_steps": training.steps,
            "micro_batch_size": spec.batch.micro_batch_size,
            "batch_accumulation_per_replica": spec.schedule.microbatches_per_update,
        },
        "optimizer": {
            "zero_stage": int(mesh.dp_shard > 1 and not spec.sharding.copies),
            "weight_decay": training.weight_decay,
            "clip_grad": training.gradient_clip,
            "accumulate_grad_in_fp32": spec.precision.grads is DType.FP32,
            "adam_eps": 1.0e-8,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "torch_adam_is_fused": True,
            "learning_rate_scheduler": _rate(source),
        },
    }
    text = yaml.safe_dump(document, sort_keys=False)
    return complete(source, text, CARRIED, _losses(source, attention))


def _losses(source: Source, attention: GroupedQueryAttention) -> list[Loss]:
    spec, found = source.spec, list(_mesh_losses(source))
    model = spec.model
    if model.mlp is not None and model.mlp.activation != "swiglu":
        found.append(
            Loss(
                "model.mlp.activation", f"model.mlp.activation = {model.mlp.activation}: nanotron's Llama has swiglu", "activation: swiglu"
            )
        )
    if attention.head_dim * attention.num_heads != model.hidden_size:
        detail = (
            f"head_dim · num_heads = {attention.head_dim * attention.num_heads}, hidden_size = {model.hidden_size}: in nanotron "
            "both are equal"
        )
        found.append(Loss("model.attention.head_dim", detail))
    if spec.optimizer.matrix == "muon":
        found.append(Loss("optimizer.matrix", "optimizer.matrix = muon: nanotron's AdamW steps every parameter", "matrix: adamw"))
    policies = {source.spec.recompute.of(letter) for letter in source.letters}
    if policies != {"none"}:
        found.append(Loss("recompute", f"recompute is {', '.join(sorted(policies))}: nanotron's config has no recompute", "default: none"))
    for role, legal in (("grads", (DType.FP32, DType.BF16)), ("master", (DType.FP32,)), ("moments", (DType.FP32,))):
        dtype = getattr(spec.precision, role)
        if dtype not in legal:
            found.append(Loss(f"precision.{role}", f"precision.{role} = {dtype}: nanotron keeps it in {' or '.join(map(str, legal))}"))
    if isinstance(spec.training.rate_schedule, StableRate) and spec.training.rate_schedule.decay == "sqrt":
        found.append(Loss("training.rate_schedule.decay", "training.rate_schedule.decay = sqrt: nanotron decays linearly", "decay: linear"))
    return found


def _mesh_losses(source: Source) -> Iterator[Loss]:
    mesh, schedule, shards = source.spec.mesh, source.spec.schedule, not source.spec.sharding.copies
    if mesh.pp > 1:
        detail = f"mesh.pp = {mesh.pp}: nanotron cuts by its own block costs, and has no option for cuts"
        yield Loss("split", detail, "mesh: {pp: 1}")
    if mesh.vpp > 1:
        yield Loss("mesh.vpp", f"mesh.vpp = {mesh.vpp}: nanotron runs one stage per rank", "vpp: 1")
    if schedule.kind not in ("1f1b", "gpipe"):
        yield Loss("schedule.kind", f"schedule.kind = {schedule.kind}: nanotron runs 1F1B or all forwards first", "schedule: {kind: 1f1b}")
    if mesh.dp_replicate > 1 and mesh.dp_shard > 1 and shards:
        detail = f"mesh.dp_replicate = {mesh.dp_replicate}, mesh.dp_shard = {mesh.dp_shard}: ZeRO-1 shards over all data ranks"
        yield Loss("mesh.dp_replicate", detail)
    if mesh.dp_shard > 1 and shards:
        yield Loss("sharding", f"mesh.dp_shard = {mesh.dp_shard}: nanotron shards optimizer state alone, and every rank has all parameters")
    if mesh.tp > 1 and not mesh.vocab_parallel:
        yield Loss("mesh.vocab_parallel", "mesh.vocab_parallel = false: nanotron shards embedding and head over tp", "vocab_parallel: true")


def _rate(source: Source) -> dict[str, Any]:
    training = source.spec.training
    rate = training.rate_schedule
    warmup = warm_up_steps(rate, training.steps)
    found: dict[str, Any] = {"learning_rate": training.learning_rate, "lr_warmup_steps": warmup, "lr_warmup_style": "linear"}
    if isinstance(rate, ConstantRate):
        return {**found, "lr_decay_style": "linear", "min_decay_lr": training.learning_rate}
    found["min_decay_lr"] = training.learning_rate * rate.final_fraction
    if isinstance(rate, StableRate):
        start = training.steps - rate.decay_steps
        return {**found, "lr_decay_style": "linear", "lr_decay_steps": rate.decay_steps, "lr_decay_starting_step": start}
    return {**found, "lr_decay_style": "cosine"}
