"""Launch arguments from Megatron-Bridge's configuration: the `run_config.yaml` that a run writes, or a recipe's sections as YAML or JSON.

Source: `ConfigContainer` of `megatron/bridge/training/config.py`, `megatron/training/config/yaml_utils.py`; Megatron-Bridge at 067f987d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megaplan.importers.megatron.arguments import Given
from megaplan.importers.megatron.log import from_attributes

SECTIONS = ("model", "train", "optimizer", "ddp", "scheduler", "dataset", "tokenizer", "rng", "comm_overlap")
"""Read in this order; of a name in several the first is taken."""
RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "sequence_length": "seq_length",
    "fp8_param": "fp8_param_gather",
    "overlap_p2p_comm": "overlap_p2p_communication",
    "use_custom_fsdp": "use_megatron_fsdp",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
RECIPES = {"current": "tensorwise", "mxfp8": "mxfp8", "subchannel": "blockwise", "delayed": "delayed"}
"""fp8's recipe by a part of the name of a mixed precision."""
_PARTS = ("transformer", "transformer_config")


def is_bridge(document: Mapping[str, Any]) -> bool:
    """Whether a document has Megatron-Bridge's sections."""
    return isinstance(document.get("model"), dict) and any(isinstance(document.get(name), dict) for name in SECTIONS[1:])


def read_bridge(document: Mapping[str, Any], line_of: Callable[[str], int | None]) -> Given:
    """The sections as launch arguments.

    Args:
        document: The whole file.
        line_of: The line of a dotted key.
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
    joint = {**_model(attributes), **_precision(attributes, document.get("mixed_precision")), **_run(attributes, document)}
    values, stored = from_attributes({key: value for key, value in attributes.items() if key not in _JOINT} | joint)
    lines = {name: line for name, key in stored.items() if key in origin and (line := line_of(origin[key])) is not None}
    found = document.get("env_vars")
    return Given(values, lines, dict(found) if isinstance(found, dict) else {}, parsed=True)


_JOINT = frozenset({
    "activation_func", "gated_linear_unit", "share_embeddings_and_output_weights", "should_pad_vocab", "num_query_groups",
    "virtual_pipeline_model_parallel_size", "grad_reduce_in_fp32", "create_attention_mask", "skip_getting_attention_mask_from_dataset",
    "bf16", "fp16", "fp32", "params_dtype", "cpu_offloading_num_layers", "spec", "tokenizer_model_path",
})  # fmt: skip


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section with the part that holds the transformer's own fields in it."""
    found = {key: value for key, value in section.items() if key not in _PARTS}
    for part in _PARTS:
        inner = section.get(part)
        if isinstance(inner, dict):
            found = {**inner, **found}
    return found


def _plain(value: Any) -> Any:
    """A dtype, function or enumeration by its name; anything else that is no object as it is."""
    if isinstance(value, dict):
        target = str(value.get("_name_") or value.get("_target_", "")).rpartition(".")[2]
        return DTYPES.get(target, target) or None
    return value


def _model(given: Mapping[str, Any]) -> dict[str, Any]:
    activation, gated = str(given.get("activation_func", "gelu")), bool(given.get("gated_linear_unit"))
    groups, heads = given.get("num_query_groups"), given.get("num_attention_heads")
    stages = given.get("virtual_pipeline_model_parallel_size")
    laid_out = any(given.get(key) for key in ("pipeline_model_parallel_layout", "hybrid_layer_pattern", "hybrid_override_pattern"))
    return {
        "swiglu": gated and activation in ("silu", "swish"),
        "squared_relu": activation in ("squared_relu", "relu2"),
        "quick_geglu": gated and activation not in ("silu", "swish"),
        "untie_embeddings_and_output_weights": not given.get("share_embeddings_and_output_weights", True),
        "no_pad_vocab_size": given.get("should_pad_vocab") is False,
        "group_query_attention": groups is not None and groups != heads,
        "num_query_groups": groups,
        "num_virtual_stages_per_pipeline_rank": stages if isinstance(stages, int) and stages > 1 and not laid_out else None,
        "max_position_embeddings": given.get("max_position_embeddings") or given.get("seq_length"),
    }


def _precision(given: Mapping[str, Any], mixed: Any) -> dict[str, Any]:
    """Of the section, or of the name of one of Megatron-Bridge's mixed precisions, such as `bf16_with_mxfp8_mixed`."""
    fields = {key: _plain(value) for key, value in mixed.items()} if isinstance(mixed, dict) else {}
    words = str(mixed) if isinstance(mixed, str) else ""
    fp16 = bool(fields.get("fp16") or given.get("fp16")) or words.startswith("fp16")
    bf16 = bool(fields.get("bf16") or given.get("bf16")) or words.startswith("bf16")
    fp8 = fields.get("fp8") or given.get("fp8") or ("hybrid" if "fp8" in words else None)
    recipe = next((name for part, name in RECIPES.items() if part in words), None)
    wide = fields.get("grad_reduce_in_fp32", given.get("grad_reduce_in_fp32", True))
    gathered = fields.get("fp8_param_gather", fields.get("fp8_param", given.get("fp8_param_gather")))
    return {
        "bf16": bf16 and not fp16,
        "fp16": fp16,
        "fp8": fp8,
        "fp8_recipe": fields.get("fp8_recipe") or recipe or given.get("fp8_recipe"),
        "fp8_param_gather": bool(gathered) and fp8 is not None,
        "fp4": fields.get("fp4") or given.get("fp4"),
        "grad_reduce_in_bf16": bf16 and not wide,
        "accumulate_allreduce_grads_in_fp32": fp16 and bool(wide),
    }


def _run(given: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    masked = given.get("create_attention_mask", True) and not given.get("skip_getting_attention_mask_from_dataset", True)
    return {
        "create_attention_mask_in_dataloader": bool(masked),
        "cpu_offloading": bool(given.get("cpu_offloading")),
        "cross_entropy_loss_fusion": bool(given.get("cross_entropy_loss_fusion", True)),
        "gradient_accumulation_fusion": bool(given.get("gradient_accumulation_fusion", True)),
        "tp_comm_overlap": bool(given.get("tp_comm_overlap")),
        "lora_rank": document["peft"].get("dim", 1) if isinstance(document.get("peft"), dict) else None,
    }
