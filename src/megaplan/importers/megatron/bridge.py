"""Launch arguments from Megatron-Bridge's configuration: the `run_config.yaml` that a run writes, or a recipe's sections as YAML or JSON.

Source: `ConfigContainer` of `megatron/bridge/training/config.py`, `megatron/training/config/yaml_utils.py`; Megatron-Bridge at 067f987d.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.megatron.arguments import Given
from megaplan.importers.megatron.log import from_attributes

SECTIONS = ("model", "train", "optimizer", "ddp", "scheduler", "dataset", "tokenizer", "rng", "comm_overlap")
"""Sections in reading order; for a name in several, the first section wins."""
RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "sequence_length": "seq_length",
    "fp8_param": "fp8_param_gather",
    "overlap_p2p_comm": "overlap_p2p_communication",
    "use_custom_fsdp": "use_megatron_fsdp",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CURRENT = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}
_RECIPES: dict[str, dict[str, Any]] = {
    "fp8_delayed_scaling": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "fp8_param_gather": True,
    },
    "fp8_current_scaling": {**_CURRENT, "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1},
    "fp8_subchannel_scaling": {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
    "nvfp4": {"fp4": "e2m1", "fp4_param_gather": True},
}
_TWO = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
MIXED_PRECISIONS: dict[str, dict[str, Any]] = {
    **{f"{dtype}_mixed": {dtype: True} for dtype in ("bf16", "fp16")},
    **{f"{dtype}_with_{name}_mixed": {dtype: True, **recipe} for dtype in ("bf16", "fp16") for name, recipe in _RECIPES.items()},
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_CURRENT, **_TWO},
    "nanov2_bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_CURRENT, "fp8_recipe": "blockwise", **_TWO},
    "nemotron_3_super_bf16_with_nvfp4_mixed": {
        "bf16": True,
        **_RECIPES["nvfp4"],
        **{"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 14},
    },
}
"""Settings of each named mixed precision; gradients are reduced in fp32, with fp16 in 16 bits (`training/mixed_precision.py`)."""
_PARTS = ("transformer", "transformer_config")
ENUMERATIONS = {
    "AttnBackend": ("flash", "fused", "unfused", "local", "auto"),
    "CudaGraphModule": ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
    "CudaGraphScope": (
        *("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
        "full_iteration_inference",
    ),
    "InferenceCudaGraphScope": ("none", "layer", "block"),
    "AttnMaskType": ("padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"),
    "LayerType": ("embedding", "loss", "encoder", "decoder", "mtp"),
    "ModelType": ("encoder_or_decoder",),
}
"""Names of the enumerations that the sections hold, in the order of their numbers from 1 (`megatron/core/transformer/enums.py`).

Resolved configurations of earlier releases hold a number alone, without `_name_`.
"""


OTHER_SECTIONS = ("checkpoint", "logger", "dist", "validation", "profiling", "peft", "ft", "straggler", "rerun_state_machine")
"""Further sections of `ConfigContainer`, of which a spec holds only LoRA's rank."""
_SIZES = (("num_layers", "hybrid_layer_pattern", "hybrid_override_pattern"), ("hidden_size",))
"""Fields of the model that every resolved configuration has: one of each."""


_TARGET, _DTYPES = "_target_", ("bf16", "fp16", "params_dtype", "fp8")


def is_bridge(document: Mapping[str, Any]) -> bool:
    """True if a document has Megatron-Bridge's sections: the model's and another, or others alone, as an override may."""
    held = [name for name in (*SECTIONS, *OTHER_SECTIONS) if isinstance(document.get(name), dict)]
    return len(held) > 1 if "model" in held else bool(held)


def refuse_override(document: Mapping[str, Any], name: str, locate: Callable[[str], Location]) -> None:
    """Refuses sections that override a recipe: the recipe has the model's sizes.

    Args:
        document: The whole file, of Megatron-Bridge.
        name: Name of the file in diagnostics.
        locate: The place of a dotted key.

    Raises:
        MegaplanError: MP926.
    """
    model = _flat(held) if isinstance(held := document.get("model"), dict) else {}
    lacking = [names[0] for names in _SIZES if all(model.get(name) is None for name in names)]
    resolved = _TARGET in (document.get("model") or {}) or isinstance(document.get("mixed_precision"), dict | str)
    if not lacking and not resolved and all(model.get(key) is None for key in _DTYPES):
        lacking = ["bf16"]  # a resolved configuration has this key in one of its sections
    if lacking:
        named = ", ".join(f"model.{key}" for key in lacking)
        detail = f"{name} has no {named}: it overrides a recipe of Megatron-Bridge or NeMo, which states the model"
        hint = "megaplan import megatron run_config.yaml   # the resolved configuration, which the run writes"
        raise MegaplanError([diagnostic("MP926", detail, locate("model" if model else ""), (hint,))])


def read_bridge(document: Mapping[str, Any], locate: Callable[[str], Location]) -> Given:
    """The sections as launch arguments.

    Args:
        document: The whole file.
        locate: The place of a dotted key.

    Raises:
        MegaplanError: MP916, the lengths of a sequence differ.
    """
    attributes: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for section in SECTIONS:
        held = document.get(section)
        for key, value in _flat(held if isinstance(held, dict) else {}).items():
            name = RENAMED.get(key, key)
            plain = _plain(value)
            if plain is not None and attributes.get(name) is None:
                attributes[name], origin[name] = plain, f"{section}.{key}"
    notes = _lengths(document, locate)
    joint = {**_model(attributes), **_precision(attributes, document.get("mixed_precision")), **_run(attributes, document)}
    values, stored = from_attributes({key: value for key, value in attributes.items() if key not in _JOINT} | joint)
    lines = {name: line for name, key in stored.items() if key in origin and (line := locate(origin[key]).line) is not None}
    found = document.get("env_vars")
    return Given(values, lines, dict(found) if isinstance(found, dict) else {}, notes, parsed=True)


def _lengths(document: Mapping[str, Any], locate: Callable[[str], Location]) -> tuple[tuple[int, str], ...]:
    """Compares the lengths of a sequence in the sections of the model and the dataset.

    Returns:
        A note with its line if they differ and Megatron-Bridge does not compare them: its pipeline uses the model's length.

    Raises:
        MegaplanError: MP916, they differ for a dataset whose length `ConfigContainer.validate` compares.
    """
    model, dataset = (_flat(held) if isinstance(held := document.get(name), dict) else {} for name in ("model", "dataset"))
    key = next((key for key in ("seq_length", "sequence_length") if dataset.get(key) is not None), None)
    if key is None or model.get("seq_length") in (None, dataset[key]):
        return ()
    said = f"dataset.{key} = {dataset[key]}, model.seq_length = {model['seq_length']}"
    place = locate(f"dataset.{key}")
    if str(dataset.get("_target_", "")).endswith("Provider"):
        return ((place.line or 0, f"{said}: sequences are planned with the model's length"),)
    hints = (f"dataset.{key}: {model['seq_length']}", f"model.seq_length: {dataset[key]}")
    raise MegaplanError([diagnostic("MP916", f"{said}, and Megatron-Bridge refuses lengths that differ", place, hints)])


_JOINT = frozenset({
    "activation_func", "gated_linear_unit", "share_embeddings_and_output_weights", "should_pad_vocab", "num_query_groups",
    "virtual_pipeline_model_parallel_size", "grad_reduce_in_fp32", "create_attention_mask", "skip_getting_attention_mask_from_dataset",
    "bf16", "fp16", "fp32", "params_dtype",
    "cpu_offloading_num_layers", "fsdp_double_buffer", "spec", "tokenizer_model_path", "fp8_param", "fp4_param",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8", "fp4", "fp8_recipe", "fp8_param_gather", "fp4_param_gather",
    "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin", "fp8_dot_product_attention", "first_last_layers_bf16",
    "main_grads_dtype",
})  # fmt: skip


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section merged with its nested section of the transformer's own fields."""
    found = {key: value for key, value in section.items() if key not in _PARTS}
    for part in _PARTS:
        inner = section.get(part)
        if isinstance(inner, dict):
            found = {**inner, **found}
    return found


def _plain(value: Any) -> Any:
    """The name of a dtype, function or enumeration, also inside a list; any other plain value unchanged."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        target = str(value.get("_name_") or value.get("_target_", "")).rpartition(".")[2]
        if not value.get("_name_") and value.get("_call_") and isinstance(numbers := value.get("_args_"), list) and len(numbers) == 1:
            return _member(target, numbers[0])
        return DTYPES.get(target, target) or None
    return value


def _member(enumeration: str, value: Any) -> str:
    """The name of an enumeration's value; `AttnBackend(9)` for a number that it does not have."""
    names = ENUMERATIONS.get(enumeration, ())
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(names):
        return names[value - 1]
    return f"{enumeration}({value})"


def _model(given: Mapping[str, Any]) -> dict[str, Any]:
    activation, gated = str(given.get("activation_func", "gelu")), bool(given.get("gated_linear_unit"))
    groups, heads = given.get("num_query_groups"), given.get("num_attention_heads")
    stages = given.get("virtual_pipeline_model_parallel_size")
    has_layout = any(given.get(key) for key in ("pipeline_model_parallel_layout", "hybrid_layer_pattern", "hybrid_override_pattern"))
    return {
        "swiglu": gated and activation in ("silu", "swish"),
        "squared_relu": activation in ("squared_relu", "relu2"),
        "quick_geglu": gated and activation not in ("silu", "swish"),
        "untie_embeddings_and_output_weights": not given.get("share_embeddings_and_output_weights", True),
        "no_pad_vocab_size": not _pads(given),
        "group_query_attention": groups is not None and groups != heads,
        "num_query_groups": groups,
        "num_virtual_stages_per_pipeline_rank": stages if isinstance(stages, int) and stages > 1 and not has_layout else None,
        "max_position_embeddings": given.get("max_position_embeddings") or given.get("seq_length"),
    }


def _pads(given: Mapping[str, Any]) -> bool:
    """True if the vocabulary is padded: by default a tokenizer's is padded, and an explicit one is not (`training/setup.py`)."""
    stated = given.get("should_pad_vocab")
    return given.get("vocab_size") is None if stated is None else bool(stated)


def _precision(given: Mapping[str, Any], mixed: Any) -> dict[str, Any]:
    """Precision settings of the section, or of a named mixed precision of Megatron-Bridge, such as `bf16_with_mxfp8_mixed`.

    A mixed precision overwrites the recipe that the optimizer reads, by default with tensorwise, and the type of gradient buffers.
    """
    named = MIXED_PRECISIONS.get(str(mixed).replace("-", "_"), {}) if isinstance(mixed, str) else {}
    stated = {key: _plain(value) for key, value in (mixed if isinstance(mixed, dict) else named).items()}
    fields = {**given, **{key: value for key, value in stated.items() if value is not None}}
    fp16 = bool(fields.get("fp16"))
    bf16, wide = bool(fields.get("bf16")) and not fp16, fields.get("grad_reduce_in_fp32")
    if wide is None:
        wide = not (named and fp16)
    return {
        "bf16": bf16,
        "fp16": fp16,
        **_low_precision({**fields, "fp8_recipe": stated.get("fp8_recipe") or ("tensorwise" if mixed else given.get("fp8_recipe"))}),
        "grad_reduce_in_bf16": bf16 and not wide,
        "accumulate_allreduce_grads_in_fp32": fp16 and bool(wide),
    }


def _low_precision(fields: Mapping[str, Any]) -> dict[str, Any]:
    """8-bit or 4-bit settings of a mixed precision; empty without them."""
    bits = next((bits for bits in ("fp8", "fp4") if fields.get(bits)), None)
    found: dict[str, Any] = {"fp8": None, "fp4": None, "fp8_recipe": fields.get("fp8_recipe"), "first_last_layers_bf16": False}
    if bits is None:
        return found
    gathered = fields.get(f"{bits}_param_gather")
    found |= {bits: fields[bits], f"{bits}_param_gather": bool(fields.get(f"{bits}_param") if gathered is None else gathered)}
    if bits == "fp8":
        found |= {name: fields.get(name) for name in ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin")}
        found["fp8_dot_product_attention"] = bool(fields.get("fp8_dot_product_attention"))
    if fields.get("first_last_layers_bf16"):
        ends = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        found |= {"first_last_layers_bf16": True, **{end: fields.get(end) or 0 for end in ends}}
    return found


def _run(given: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    masked = given.get("create_attention_mask", True) and not given.get("skip_getting_attention_mask_from_dataset", True)
    peft = document["peft"] if isinstance(document.get("peft"), dict) else {}
    return {
        "create_attention_mask_in_dataloader": bool(masked),
        "cpu_offloading": bool(given.get("cpu_offloading")),
        "cpu_offloading_num_layers": given.get("cpu_offloading_num_layers") if given.get("cpu_offloading") else None,
        "fsdp_double_buffer": bool(given.get("fsdp_double_buffer") or given.get("nccl_ub")) and bool(given.get("use_megatron_fsdp")),
        "megatron_fsdp_main_params_dtype": given.get("megatron_fsdp_main_params_dtype") or "fp32",
        "cross_entropy_loss_fusion": bool(given.get("cross_entropy_loss_fusion", True)),
        "gradient_accumulation_fusion": bool(given.get("gradient_accumulation_fusion", True)),
        "tp_comm_overlap": bool(given.get("tp_comm_overlap")),
        "lora_rank": peft.get("dim", 32) if peft else None,
        "lora_alpha": peft.get("alpha", 32),
    }
