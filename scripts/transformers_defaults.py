"""Write the class defaults of transformers' configs: src/megaplan/importers/transformers_defaults.json.

Runs where transformers is installed: `scripts/test_upstream.sh --defaults`. Facts alone are taken: fields with their defaults, other names
of a field, the base of rotary angles, and the class that has a head over the vocabulary.
"""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from megaplan.importers.registry import ARCHITECTURES
from megaplan.importers.sound import EVERY_ENCODER
from megaplan.importers.towers import MULTIMODAL, NAMES, TEXT

TARGET = Path(__file__).parents[1] / "src/megaplan/importers/transformers_defaults.json"


def plain(value: Any) -> Any:
    """A value as JSON; infinite limits of time steps as Python's JSON writes them."""
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


def defaults(config: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields that the class itself declares; `tie_word_embeddings` is declared by some bases."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    found = {}
    for field in dataclasses.fields(config):
        if field.name not in base:
            value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            found[field.name] = plain(None if value is dataclasses.MISSING else value)
    return dict(sorted(found.items()))


def facts(model_type: str) -> dict[str, Any]:
    """Entry of the table for a model type."""
    config = CONFIG_MAPPING[model_type]
    fields = defaults(config)
    theta = getattr(config, "default_theta", None)
    theta = theta.get("global") if isinstance(theta, dict) else theta
    if theta is not None:
        fields.setdefault("rope_theta", theta)
    pairs = (getattr(config, "attribute_map", {}) or {}).items()
    renamed = {one: two for one, two in pairs if two in fields} | {two: one for one, two in pairs if two not in fields and one in fields}
    found = {"class": model_class(model_type), "renamed": renamed, "fields": fields}
    if model_type in MULTIMODAL:
        found |= {"parts": parts(config), "forwards_tie": forwards_tie(config)}
    return found


def model_class(model_type: str) -> str:
    """Class with a head over the vocabulary, or the class of an encoder."""
    tables = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) if model_type in MULTIMODAL else ()
    heads = {key: name for key, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items() if str(name).endswith("ForCausalLM")}
    for table in (*tables, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, heads, MODEL_MAPPING_NAMES):
        if name := table.get(model_type):
            return name if isinstance(name, str) else name[0]
    config = CONFIG_MAPPING[model_type]
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    found = (name for name, one in vars(module).items() if name.endswith("TextModel") and getattr(one, "config_class", None) is config)
    return next(found, "")


def parts(config: type[PreTrainedConfig]) -> dict[str, list[Any]]:
    """Type, whether it is fixed or optional, and fields of every nested config that is text or an encoder."""
    keys = (TEXT, *NAMES)
    return {
        key: [
            spec.model_type or spec.config_class.model_type,
            spec.config_class is not AutoConfig,
            bool(spec.optional),
            plain(spec.init_kwargs),
        ]
        for key, spec in config.sub_configs_defaults.items()
        if key in keys
    }


def forwards_tie(config: type[PreTrainedConfig]) -> bool:
    """True if the class nests a text model and takes its `tie_word_embeddings`."""
    spec = config.sub_configs_defaults.get(TEXT)
    if spec is None:
        return False
    text = {"tie_word_embeddings": True, "model_type": spec.model_type or spec.config_class.model_type}
    return bool(config(text_config=text, tie_word_embeddings=False).tie_word_embeddings)


def main() -> None:
    """Write the table, a line a model type."""
    base = sorted(field.name for field in dataclasses.fields(PreTrainedConfig))
    types = sorted({*ARCHITECTURES, *EVERY_ENCODER, *MULTIMODAL})
    lines = [f"  {json.dumps(name)}: {json.dumps(facts(name), ensure_ascii=False)}" for name in types]
    head = f'{{"transformers": {json.dumps(transformers.__version__)},\n "common": {json.dumps(base)},\n "types": {{\n'
    TARGET.write_text(head + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
