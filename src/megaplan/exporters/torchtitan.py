"""torchtitan's `parallelism`, `training`, `optimizer` and `lr_scheduler` sections, with the modules of each stage.

Source: `torchtitan/config/configs.py` and `torchtitan/components/optimizer/` of torchtitan 0.3.0. The model is its own registry's.
"""

import json
import shlex
from itertools import pairwise
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.dtypes import DType
from megaplan.errors import Location
from megaplan.exporters.modules import TORCH_DTYPES
from megaplan.exporters.values import Exported, InexpressibleError, Loss, Source, complete
from megaplan.hosts.torchtitan import HOST
from megaplan.hosts.torchtitan.blocks import PAIRS, SIZE
from megaplan.hosts.torchtitan.limits import RECIPES
from megaplan.spec.comments import SECTION, unsaid_settings
from megaplan.spec.pattern import BOUNDARY
from megaplan.spec.training import ConstantRate, CosineRate, warm_up_steps

CARRIED = frozenset({
    "mesh.pp", "mesh.vpp", "mesh.dp_replicate", "mesh.dp_shard", "mesh.cp", "mesh.tp", "mesh.ep",
    "sharding.mode", "sharding.reshard_after_forward", "schedule", "batch",
    "precision.params", "precision.master", "optimizer.matrix", "optimizer.other", "training.steps", "training.seed",
    "training.learning_rate", "training.weight_decay", "training.gradient_clip", "training.rate_schedule", "mesh.vocab_parallel",
    "recompute.default", "recompute.blocks",
})  # fmt: skip
OF_ITS_HOST = frozenset({"host.name", "host.compile_model", "host.compile_loss", "host.async_tensor_parallel", "host.foreach_optimizer",
    "host.reserved_percent", "precision.recipe", "precision.reduce", "precision.grads", "precision.moments",
})  # fmt: skip
"""Keys that are written for a spec whose host is torchtitan, or that affect only estimates."""
UNSAID = (
    "device", "serving", "host.checkpoint_every", "host.checkpoints", "host.repeat_kv", "host.fsdp_ends", "host.keep_pipeline_outputs",
    "host.eager_combine", "host.reserved_percent",
)  # fmt: skip
"""Keys that change an estimate and that no key of torchtitan says, besides the model; the file's own section carries them."""
NO_CLIP = 1e30
"""Norm of gradients that none reaches."""


def export_torchtitan(source: Source) -> Exported:
    """JSON whose sections have the names and fields of torchtitan's own config classes.

    Raises:
        InexpressibleError: A stage ends inside a block of torchtitan.
    """
    spec, losses = source.spec, _losses(source)
    mesh, schedule, training = spec.mesh, spec.schedule, spec.training
    modules, lost = _modules(source)
    losses += [*lost, *source.torch_schedule[1]]
    size = spec.batch.micro_batch_size
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "fsdp_reshard_after_forward": "always" if spec.sharding.reshard_after_forward else "never",
        "tensor_parallel_degree": mesh.tp,
        "enable_sequence_parallel": True,
        "pipeline_parallel_degree": mesh.pp,
        "context_parallel_degree": mesh.cp,
        "expert_parallel_degree": mesh.ep,
    }
    if mesh.pp > 1:
        parallelism |= {
            "pipeline_parallel_schedule": source.torch_schedule[0],
            "pipeline_parallel_microbatch_size": size,
            "module_fqns_per_model_part": modules,
        }
    document = {
        "parallelism": parallelism,
        "training": {
            "local_batch_size": size * schedule.num_microbatches if mesh.pp > 1 else size,
            "global_batch_size": source.spec.global_batch_size,
            "seq_len": spec.batch.seq_length,
            "max_norm": training.gradient_clip if training.gradient_clip is not None else NO_CLIP,
            "steps": training.steps,
            "dtype": TORCH_DTYPES[str(spec.precision.master)],
            "mixed_precision_param": TORCH_DTYPES[str(spec.precision.params)],
            "mixed_precision_reduce": TORCH_DTYPES[str(spec.precision.reduce)] if source.is_of(HOST.name) else "float32",
        },
        "optimizer": {"name": "AdamW", "lr": training.learning_rate, "weight_decay": training.weight_decay},
        "lr_scheduler": _rate(source),
        "activation_checkpoint": _checkpoint(source),
        "debug": {"seed": training.seed},
    }
    if not source.is_of(HOST.name):
        return complete(source, json.dumps(document, indent=1) + "\n", CARRIED, losses)
    _add_host(source, document)
    unsaid = dict(unsaid_settings(spec, UNSAID))
    document[SECTION] = {"model": spec.model.model_dump(mode="json", exclude_unset=True), **unsaid}
    return complete(source, json.dumps(document, indent=1) + "\n", CARRIED | OF_ITS_HOST, losses)


def _checkpoint(source: Source) -> str:
    """One policy for all blocks; `selective` means per-operation checkpointing under host torchtitan."""
    if source.is_of(HOST.name) and _all(source, "selective"):
        return "selective"
    return "full" if _all(source, "full") else "none"


def _add_host(source: Source, document: dict[str, Any]) -> None:
    """Adds the sections of a spec whose host is torchtitan."""
    host, recipe = source.spec.host, source.spec.precision.recipe
    components = [name for name, compiled in (("model", host.compile_model), ("loss", host.compile_loss)) if compiled]
    document["compile"] = {"enable": bool(components), "components": components or ["model", "loss"]}
    document["parallelism"]["enable_async_tensor_parallel"] = host.async_tensor_parallel
    document["optimizer"]["implementation"] = "foreach" if host.foreach_optimizer else "fused"
    if recipe is not None:
        name = RECIPES[recipe.name]
        document["model"] = {"converters": ["quantize.linear.float8"]}
        float8 = {"recipe_name": name, "enable_fsdp_float8_all_gather": recipe.param_gather, "filter_fqns": ["output"]}
        document["quantize"] = {"linear": {"float8": float8}}


def _all(source: Source, wanted: str) -> bool:
    return all(source.spec.recompute.of(letter) == wanted for letter in source.letters)


def _losses(source: Source) -> list[Loss]:
    spec, found = (
        source.spec,
        [Loss("model", "model: torchtitan builds it from its own registry; its dimensions must equal this plan's", strict=False)],
    )
    if spec.optimizer.matrix == "muon":
        found.append(Loss("optimizer.matrix", "optimizer.matrix = muon: torchtitan's AdamW is written for all parameters", "matrix: adamw"))
    if _checkpoint(source) == "none" and not _all(source, "none"):
        said = ", ".join(f"{letter}: {source.spec.recompute.of(letter)}" for letter in sorted(set(source.letters)))
        found.append(
            Loss(
                "recompute",
                f"recompute is {said}: torchtitan has one policy for all blocks; the job is written without recompute",
                "default: none or full",
            )
        )
    if spec.sharding.copies and spec.mesh.dp_shard > 1:
        detail = f"sharding.mode = ddp, mesh.dp_shard = {spec.mesh.dp_shard}: torchtitan copies over dp_replicate alone"
        found.append(Loss("sharding.mode", detail, "mesh: {dp_shard: 1}, and mesh.dp_replicate of the same degree"))
    if spec.mesh.etp > 1:
        found.append(Loss("mesh.etp", f"mesh.etp = {spec.mesh.etp}: torchtitan shards experts over ep alone", "etp: 1"))
    if spec.mesh.tp > 1 and not spec.mesh.vocab_parallel:
        found.append(
            Loss("mesh.vocab_parallel", "mesh.vocab_parallel = false: torchtitan shards embedding and head over tp", "vocab_parallel: true")
        )
    for role in ("params", "master"):
        dtype = getattr(spec.precision, role)
        if dtype not in (DType.FP32, DType.BF16):
            found.append(Loss(f"precision.{role}", f"precision.{role} = {dtype}: torchtitan has float32 and bfloat16", f"{role}: bf16"))
    if spec.schedule.steps_per_update > 1 and spec.mesh.pp > 1:
        detail = f"schedule.steps_per_update = {spec.schedule.steps_per_update}: torchtitan derives it from both batch sizes"
        if spec.schedule.num_microbatches < spec.mesh.pp:
            found.append(Loss("schedule.steps_per_update", detail))
    return found


def _modules(source: Source) -> tuple[list[list[str]], list[Loss]]:
    """Names of each stage's modules: a block of torchtitan is an A layer and the D or E layer after it."""
    letters, slots = source.letters, source.slots()
    losses: list[Loss] = []
    size = SIZE
    if not {letters[start : start + SIZE] for start in range(0, len(letters), SIZE)} <= {*PAIRS}:
        size = 1
        detail = "torchtitan's blocks are attention with an MLP or experts; stages name one module a layer of this plan"
        losses.append(Loss("model.pattern", detail))
    elif odd := [slot.start for slot in slots if slot.start % SIZE]:
        raise _cut_blocks(source, odd)
    stages = []
    for slot in slots:
        names = ["tok_embeddings"] if slot.index == 0 else []
        names += [f"layers.{block}" for block in range(slot.start // size, slot.stop // size)]
        stages.append(names + (["norm", "output"] if slot.index == len(slots) - 1 else []))
    return stages, losses


def _cut_blocks(source: Source, odd: list[int]) -> InexpressibleError:
    """The error of stages that begin at odd layers; its hint is the command that cuts at the nearest blocks."""
    spec, count, blocks = source.spec, len(source.slots()), len(source.letters) // SIZE
    shown = ", ".join(map(str, odd[:8])) + (", …" if len(odd) > 8 else "")
    detail = f"stages begin at layers {shown}, inside a block of torchtitan: layers 2 · n and 2 · n + 1 are its layers.n"
    if count > blocks:
        hint = f"mesh.pp · mesh.vpp of at most {blocks}, the blocks of torchtitan"
        return InexpressibleError([diagnostic("MP920", f"{detail}\n{count} stages, {blocks} blocks", Location(key="split.spans"), (hint,))])
    starts = [0]
    for slot in source.slots()[1:]:
        starts.append(min(max(slot.start // SIZE, starts[-1] + 1), blocks - count + slot.index))
    spans = [[SIZE * start, SIZE * stop] for start, stop in pairwise([*starts, blocks])]
    settings = [f"mesh.pp={spec.mesh.pp}"]
    if spec.mesh.vpp > 1:
        settings += [f"mesh.vpp={spec.mesh.vpp}", f"schedule.kind={spec.schedule.kind}"]
    if BOUNDARY in spec.model.pattern:
        settings.append(f"model.pattern={source.letters}")
    settings.append(f"split={{mode: manual, spans: {spans}, reason: blocks of torchtitan}}")
    words = " ".join(f"--set {shlex.quote(text)}" for text in settings)
    return InexpressibleError([diagnostic("MP920", detail, Location(key="split.spans"), (f"megaplan split SPEC {words} -o PLAN",))])


def _rate(source: Source) -> dict[str, Any]:
    training = source.spec.training
    rate = training.rate_schedule
    found: dict[str, Any] = {"warmup_steps": warm_up_steps(rate, training.steps)}
    if isinstance(rate, ConstantRate):
        return {**found, "decay_ratio": 0.0}
    if isinstance(rate, CosineRate):
        return {**found, "decay_type": "cosine", "min_lr_factor": rate.final_fraction}
    return {
        **found,
        "decay_ratio": rate.decay_steps / training.steps,
        "decay_type": rate.decay,
        "min_lr_factor": rate.final_fraction,
    }
