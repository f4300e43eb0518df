"""A published recipe of Megatron-Bridge as the configuration that `megaplan import megatron` reads.

A recipe is a flat mapping of dotted keys (`model.tensor_model_parallel_size`). It states what it changes; the architecture is that of the
model in its name, from `architectures.json`, and its mixed precision is the preset that the end of its name refers to.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megaplan.importers.megatron.bridge import MIXED_PRECISIONS

TABLE = Path(__file__).with_name("architectures.json")
DEVICES = {"h100": "h100-sxm", "a100": "a100-80gb"}
"""Device of each platform that is not named after a device."""
PER_NODE = {"gb200": 4, "gb300": 4, "vr200": 4}
"""Devices of a node where there are not eight."""
PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp8cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp8mx": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""The preset of a recipe's suffix; `_perf_precision` of `megatron/bridge/perf_recipes/_common.py` at 067f987d."""
LAUNCHED = "megatron.bridge.perf_recipes."
"""Modules of the recipes that `scripts/performance/run_script.py` starts. Without `--data` it replaces their dataset by one of mock texts,
of the length that the model states: `set_user_overrides` of `scripts/performance/utils/overrides.py` at 067f987d."""
_NAME = re.compile(rf"(?P<model>.+?)_(pretrain|sft|peft|lora)_(?P<gpus>\d+)gpu_(?P<device>[a-z]+\d+)_(?P<precision>{'|'.join(PRECISIONS)})")


class NotExpressedError(Exception):
    """A recipe that no spec says, with the reason."""


def parts_of(name: str) -> dict[str, str]:
    """Model, GPUs, device and precision of a recipe's name.

    Raises:
        NotExpressedError: The name is not in Megatron-Bridge's form.
    """
    found = _NAME.match(name)
    if found is None:
        raise NotExpressedError(f"the name is not MODEL_TASK_Ngpu_DEVICE_PRECISION with one of {', '.join(PRECISIONS)}")
    return found.groupdict()


def bridge_document(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe in Megatron-Bridge's sections.

    Args:
        name: Name of the recipe, such as `llama3_8b_pretrain_8gpu_h100_bf16_config`.
        recipe: Values by dotted key.

    Raises:
        NotExpressedError: Neither the recipe nor the table has the architecture.
    """
    parts = parts_of(name)
    document: dict[str, Any] = {"train": {}}
    for key, value in recipe.items():
        section, _, field = key.partition(".")
        if field and not field.startswith("_"):
            document.setdefault(section, {})[field] = _plain(value)
        elif section == "env_vars":
            document[section] = value
    stated = {key: value for key, value in document.setdefault("model", {}).items() if value is not None}
    stated.pop("offload_modules", None) if not stated.get("fine_grained_activation_offloading") else None
    document["model"] = {**architecture(parts["model"], stated), **stated}
    if str(recipe.get("_module", "")).startswith(LAUNCHED) and "dataset" in document and "seq_length" in stated:
        document["dataset"] = {**document["dataset"], "seq_length": stated["seq_length"]}
    document["mixed_precision"] = {**MIXED_PRECISIONS[preset_of(parts)], **document.get("mixed_precision", {})}
    return document


def preset_of(parts: Mapping[str, str]) -> str:
    """The named mixed precision of a recipe; the performance recipes of current scaling then keep no layer in 16 bits."""
    if parts["precision"] == "nvfp4" and parts["model"] == "nemotron_3_super":
        return "nemotron_3_super_bf16_with_nvfp4_mixed"
    return PRECISIONS[parts["precision"]]


def architecture(model: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own fields by Megatron-Bridge's names.

    Raises:
        NotExpressedError: The value is in no table, and the recipe does not state it.
    """
    table = _table()
    found = table["models"].get(model)
    if found is None:
        if "hidden_size" in stated:
            return {}
        raise NotExpressedError(f"the architecture of {model} is neither in the recipe nor in architectures.json")
    bases = [table["bases"][base] for base in found["base"]]
    own = {key: value for key, value in found.items() if key != "base"}
    return {key: value for part in (*bases, own) for key, value in part.items()}


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def _plain(value: Any) -> Any:
    """A dtype or a function by its name."""
    if isinstance(value, str) and re.fullmatch(r"(torch|megatron)[\w.]+", value):
        last = value.rpartition(".")[2]
        return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(last, last)
    return value
