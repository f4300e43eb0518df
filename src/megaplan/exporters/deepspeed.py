"""A DeepSpeed configuration: ZeRO, precision, batch, optimizer, schedule of rates, and the pipeline's partition.

Source: `deepspeed/runtime/config.py` of DeepSpeed 0.19.8. The model and its pipeline module are the reader's code. Bucket sizes are
DeepSpeed's own defaults: they belong to a topology, and none was measured here.
"""

import json
from typing import Any

from megaplan.dtypes import DType
from megaplan.exporters.values import Exported, Loss, Source, complete
from megaplan.spec.training import ConstantRate, CosineRate, StableRate, warm_up_steps

CARRIED = frozenset({
    "mesh.pp", "mesh.dp_shard", "mesh.dp_replicate", "mesh.vpp", "mesh.tp", "mesh.cp", "mesh.ep",
    "sharding.mode", "sharding.reshard_after_forward", "schedule", "batch",
    "precision.params", "precision.grads", "precision.master", "precision.moments", "precision.reduce", "optimizer.matrix",
    "optimizer.other", "recompute", "training.steps", "training.learning_rate", "training.weight_decay", "training.gradient_clip",
    "training.seed", "training.rate_schedule",
})  # fmt: skip


def export_deepspeed(source: Source) -> Exported:
    """JSON for `deepspeed.initialize`."""
    spec = source.spec
    mesh, training = spec.mesh, spec.training
    stage, losses = _stage(source)
    losses += _losses(source)
    muon = spec.optimizer.matrix == "muon"
    document: dict[str, Any] = {
        "train_batch_size": source.spec.global_batch_size,
        "train_micro_batch_size_per_gpu": spec.batch.micro_batch_size,
        "gradient_accumulation_steps": spec.schedule.microbatches_per_update,
        "gradient_clipping": training.gradient_clip if training.gradient_clip is not None else 0.0,
        "bf16": {"enabled": spec.precision.params is DType.BF16},
        "fp16": {"enabled": spec.precision.params is DType.FP16},
        "communication_data_type": str(spec.precision.reduce),
        "data_types": {"grad_accum_dtype": str(spec.precision.grads)},
        "zero_optimization": stage,
        "optimizer": {
            "type": "Muon" if muon else "AdamW",
            "params": {"lr": training.learning_rate, "weight_decay": training.weight_decay},
        },
        "scheduler": _rate(source),
        "seed": training.seed,
        "steps": training.steps,
        "sequence_length": spec.batch.seq_length,
        "tensor_parallel": {"autotp_size": mesh.tp},
        "sequence_parallel_size": mesh.cp,
        "expert_parallel_size": mesh.ep,
    }
    if mesh.pp > 1:
        document["pipeline"] = {"stages": mesh.pp, "partition": "uniform", "activation_checkpoint_interval": int(_recomputes(source))}
    elif _recomputes(source):
        document["activation_checkpointing"] = {"partition_activations": False, "number_checkpoints": len(source.letters)}
    return complete(source, json.dumps(document, indent=1) + "\n", CARRIED, losses)


def _recomputes(source: Source) -> bool:
    return all(source.spec.recompute.of(letter) == "full" for letter in source.letters)


def _stage(source: Source) -> tuple[dict[str, Any], list[Loss]]:
    """ZeRO stage: under a pipeline optimizer states only; parameters if they are freed after forward; else gradients and states."""
    spec, losses = source.spec, []
    mesh, reshard = spec.mesh, spec.sharding.reshard_after_forward
    if mesh.dp_replicate > 1 and not spec.sharding.copies:
        detail = f"mesh.dp_replicate = {mesh.dp_replicate}, mesh.dp_shard = {mesh.dp_shard}: ZeRO shards over all data ranks"
        losses.append(Loss("mesh.dp_replicate", detail, f"mesh: {{dp_replicate: 1, dp_shard: {source.spec.mesh.data_ranks}}}"))
    if mesh.pp > 1 and reshard and not spec.sharding.copies:
        detail = "sharding.reshard_after_forward = true: DeepSpeed's pipeline supports at most ZeRO 1"
        losses.append(Loss("sharding.reshard_after_forward", detail, "reshard_after_forward: false"))
    level = 1 if mesh.pp > 1 else 3 if reshard else 2
    if source.spec.mesh.data_ranks == 1 or spec.sharding.copies:
        level = 0
    return {"stage": level}, losses


def _losses(source: Source) -> list[Loss]:
    spec = source.spec
    mesh, schedule = spec.mesh, spec.schedule
    found = [Loss("model", "model: DeepSpeed wraps a module from your code; its dimensions must equal this plan's", strict=False)]
    sizes = {slot.stop - slot.start for slot in source.slots()}
    if mesh.pp > 1 and len(sizes) > 1:
        counts = ", ".join(str(slot.stop - slot.start) for slot in source.slots())
        detail = f"stages of {counts} layers: DeepSpeed partitions by count, parameters or a class name, and uniform is written"
        found.append(Loss("split", detail, "split: {mode: equal}"))
    if mesh.vpp > 1:
        found.append(Loss("mesh.vpp", f"mesh.vpp = {mesh.vpp}: DeepSpeed runs one stage per rank", "vpp: 1"))
    if schedule.kind != "1f1b":
        found.append(Loss("schedule.kind", f"schedule.kind = {schedule.kind}: DeepSpeed's pipeline is 1F1B", "schedule: {kind: 1f1b}"))
    policies = {letter: source.spec.recompute.of(letter) for letter in sorted(set(source.letters))}
    if set(policies.values()) not in ({"none"}, {"full"}):
        said = ", ".join(f"{letter}: {value}" for letter, value in policies.items())
        found.append(
            Loss(
                "recompute",
                f"recompute is {said}: DeepSpeed recomputes every layer or none; the config is written with none",
                "default: none or full",
            )
        )
    if mesh.tp > 1 and mesh.pp > 1:
        found.append(
            Loss("mesh.tp", f"mesh.tp = {mesh.tp} with mesh.pp = {mesh.pp}: under a pipeline tensor parallelism is the model's own code")
        )
    if mesh.cp > 1:
        found.append(Loss("mesh.cp", f"mesh.cp = {mesh.cp}: DeepSpeed cuts heads (Ulysses) where this plan cuts the sequence"))
    if isinstance(spec.training.rate_schedule, StableRate):
        detail = "training.rate_schedule.kind = wsd: DeepSpeed has no stable phase, and a linear decay from the warm-up on is written"
        found.append(Loss("training.rate_schedule", detail, "kind: constant or cosine"))
    if spec.optimizer.matrix == "muon":
        found.append(
            Loss("optimizer.matrix", "optimizer.matrix = muon: DeepSpeed's Muon steps what the model marks with use_muon", "matrix: adamw")
        )
    for role in ("params", "master", "moments", "grads", "reduce"):
        dtype, legal = (
            getattr(spec.precision, role),
            (DType.FP32,) if role in ("master", "moments") else (DType.FP32, DType.BF16, DType.FP16),
        )
        if dtype not in legal:
            found.append(Loss(f"precision.{role}", f"precision.{role} = {dtype}: DeepSpeed keeps it in {' or '.join(map(str, legal))}"))
    return found


def _rate(source: Source) -> dict[str, Any]:
    training = source.spec.training
    rate = training.rate_schedule
    warmup = {"warmup_num_steps": warm_up_steps(rate, training.steps)}
    if isinstance(rate, ConstantRate):
        return {"type": "WarmupLR", "params": {"warmup_max_lr": training.learning_rate, "warmup_type": "linear", **warmup}}
    if isinstance(rate, CosineRate):
        return {"type": "WarmupCosineLR", "params": {"total_num_steps": training.steps, "cos_min_ratio": rate.final_fraction, **warmup}}
    shape = {"warmup_max_lr": training.learning_rate, "total_num_steps": training.steps}
    return {"type": "WarmupDecayLR", "params": {**shape, **warmup}}
