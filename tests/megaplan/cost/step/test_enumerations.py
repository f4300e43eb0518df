"""Every value of every enumeration of a spec moves the step of a framework, or is listed here as neutral."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.layout.step_time import planned_time
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec

MODEL: dict[str, Any] = {
    **{"pattern": "ADAE", "num_layers": 8, "hidden_size": 1024, "vocab_size": 32000, "mlp": {"ffn_hidden_size": 4096}},
    **{"attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "window_size": 1024, "full_layers": [0]}},
    **{"moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 512}},
}
BASES: dict[str, dict[str, Any]] = {
    "megatron": {
        "format": "megaplan.spec/1",
        "name": "base",
        "model": MODEL,
        "mesh": {"pp": 2, "tp": 2, "dp_shard": 4, "ep": 2, "vocab_parallel": True},
        "batch": {"micro_batch_size": 2, "seq_length": 4096},
        "schedule": {"num_microbatches": 8},
        "precision": {"params": "bf16", "grads": "fp32", "reduce": "fp32"},
        "optimizer": {"matrix": "adamw"},
        "host": {"name": "megatron", "model": "gpt", "framework": "megatron-bridge", "release": "26.04", "moe_dispatcher": "alltoall"},
        "device": {"name": "h100-sxm"},
    },
}
BASES["megatron fp8"] = BASES["megatron"] | {"precision": {"params": "bf16", "recipe": {"name": "fp8_current"}}}
BASES["megatron hybrid"] = BASES["megatron"] | {
    "model": {
        **MODEL,
        "pattern": "MEAD",
        "mamba": {"kind": "mamba2", "num_groups": 8},
        "attention": {**MODEL["attention"], "full_layers": []},
    },
    "host": {**BASES["megatron"]["host"], "model": "hybrid"},
}
BASES["megatron fsdp"] = BASES["megatron"] | {
    "model": {key: value for key, value in MODEL.items() if key != "moe"} | {"pattern": "AD"},
    "mesh": {"tp": 2, "dp_shard": 4, "vocab_parallel": True},
}
BASES["megatron without windows"] = BASES["megatron fsdp"] | {
    "model": {**BASES["megatron fsdp"]["model"], "attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}},
    "host": {**BASES["megatron"]["host"], "moe_dispatcher": "allgather", "release": None},
}
BASES["torchtitan"] = BASES["megatron fsdp"] | {
    "model": {**BASES["megatron fsdp"]["model"], "attention": {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}},
    "precision": {"params": "bf16", "grads": "fp32", "reduce": "fp32"},
    "recompute": {"default": "selective"},
    "host": {"name": "torchtitan"},
}
BASES["torchtitan fp8"] = BASES["torchtitan"] | {
    "precision": {"params": "bf16", "grads": "fp32", "reduce": "fp32", "recipe": {"name": "fp8_current"}}
}
CHOSEN = {
    "host.moe_flex_backend": {"host.moe_dispatcher": "flex"},
    "host.recompute_method": {"host.recompute_num_layers": 1},
    "host.flash_version": {"host.transformer_impl": "local", "host.attention_backend": "flash"},
    "host.rope_fusion": {"host.transformer_impl": "local", "host.attention_backend": "flash"},
    "host.all_reduce_gradients": {"host.transformer_impl": "local", "host.attention_backend": "flash"},
    "host.distribute_saved_activations": {"host.recompute_num_layers": 1, "host.sequence_parallel": False},
}
"""Other settings that an enumeration needs before its values mean anything."""
OF_MEMORY = {
    "data.packing", "host.attention_mask", "host.expandable_segments", "host.fsdp_double_buffer", "host.fsdp_ends",
    "host.fsdp_keeps_transposes", "host.fsdp_max_pool", "host.fsdp_persistent_buffers",
    "host.exp_avg_sq_dtype", "host.keep_pipeline_outputs", "host.mtp_repeated", "host.optimizer_recipe",
    "host.layer_wise_layout", "host.precision_aware_optimizer",
    "precision.grads", "precision.master", "precision.moments", "precision.params",
}  # fmt: skip
"""Keys about saved tensors and dtypes: fitted steps have one value, or show no difference; fp32 `params` have no time."""
OF_VALUES = {
    "host.model", "host.moe_load_balancing", "mesh.context_exchange", "mesh.towers", "mesh.vocab_parallel", "model.attention.gate_bias",
    "model.attention.key_bias", "model.stream_scale",
    "model.attention.gate_width",
    "model.attention.qk_norm_width", "model.attention.value_norm", "model.attention.values_from_keys", "recompute.towers",
    "model.moe.expert_bias",
    "model.moe.capacity_drop", "model.moe.normalize_top_k", "model.moe.score",
    "model.zero_centered_norm", "optimizer.newton_schulz_dtype", "optimizer.other",
    "precision.recipe.format", "precision.recipe.prediction", "precision.recipe.amax_compute",
}  # fmt: skip
"""Keys of which these hosts have one value, or which change values of tensors alone."""
NOT_MEASURED = {
    "host.compile_loss", "host.cross_entropy", "host.delayed_wgrad", "host.foreach_optimizer",
    "host.fused_squared_relu", "host.moe_grouped_gemm", "host.moe_permute_fusion", "host.moe_router_dtype", "host.moe_shared_overlap",
    "host.moe_flex_backend", "host.repeat_kv", "host.eager_combine",
    "precision.recipe.head",
}  # fmt: skip
"""Choices of kernels without a published pair of steps: the step is the fused kernels'."""
NOT_OF_THESE_HOSTS = {
    "model.attention.output_bias", "model.attention.output_norm", "model.attention.qk_norm_scale", "model.attention.query_norm_scale",
    "model.attention.values_are_keys", "model.embedding_norm",
    "model.head_bias", "model.mlp.inner_norm", "model.mamba.bias", "model.mamba.conv_bias", "model.mamba.gated_norm",
    "model.mlp.bias", "model.moe.activation", "model.moe.bias", "model.moe.expert_choice", "model.moe.own_norms", "model.moe.router_bias",
    "model.moe.score_correction", "model.norm_placement", "sharding.mode", "sharding.wrap",
}  # fmt: skip
"""Options that a host refuses, or takes for all blocks at once, so that one of them alone has one legal value."""
NEUTRAL = OF_MEMORY | OF_VALUES | NOT_MEASURED | NOT_OF_THESE_HOSTS


def choices(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Dotted keys of the enumerations and switches of a spec, with all their values."""
    for name, field in type(model).model_fields.items():
        key, value = f"{prefix}{name}", getattr(model, name)
        if isinstance(value, BaseModel):
            yield from choices(value, f"{key}.")
        elif (values := _values(field.annotation)) and name != "kind" and key not in ("format", "host.name"):
            yield key, values


def _values(annotation: Any) -> tuple[Any, ...]:
    """Values of an annotation that has a few."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if annotation is bool:
        return (True, False)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(str(each) for each in annotation)
    return tuple(value for part in get_args(annotation) for value in _values(part))


def changed(document: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A copy of the document with settings by dotted key."""
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        document = document | {section: changed(document.get(section, {}), {rest: value}) if rest else value}
    return document


def seconds(document: dict[str, Any]) -> float | None:
    """Seconds of the step; None if the spec is refused or has no time."""
    try:
        spec = spec_from_document(document)
    except MegaplanError:
        return None
    inventory = build_inventory(spec)
    found = planned_time(spec, choose_cuts(spec, inventory).spans, inventory)
    return None if isinstance(found, str) else found.seconds


def moving() -> dict[str, bool]:
    """Every enumeration with at least two legal values, and True if they give different steps under some base."""
    found: dict[str, bool] = {}
    for base in BASES.values():
        for key, values in choices(Spec.model_validate(base)):
            plain = changed(base, CHOSEN.get(key, {}))
            times = {time for value in values if (time := seconds(changed(plain, {key: value}))) is not None}
            if times:
                found[key] = found.get(key, False) or len(times) > 1
    return found


def test_every_enumeration_moves_the_step_or_is_neutral() -> None:
    found = moving()
    assert {key for key, moves in found.items() if not moves} == NEUTRAL


def test_megaruns_dispatchers_move_its_step() -> None:
    base = changed(BASES["megatron"], {"host": {"name": "megarun"}})
    times = {seconds(changed(base, {"host.moe_dispatcher": value})) for value in (None, "alltoall", "allgather")}
    assert None not in times
    assert len(times) == 2
