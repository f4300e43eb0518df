"""Imported models have as many parameters as transformers builds: every model type, 20 random configs each, in three spellings."""

import dataclasses
import importlib
import json
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from hf_configs import CONFIGS, random_config  # noqa: E402

from megaplan.importers.defaults import class_facts  # noqa: E402
from megaplan.importers.hf import import_hf  # noqa: E402
from megaplan.importers.registry import ARCHITECTURES  # noqa: E402
from megaplan.inventory.build import build_inventory  # noqa: E402

COUNT = 20


def model_class(model_type: str) -> Any:
    """transformers' own class: fla registers others under the same model types when a model of transformers imports it."""
    module = transformers.CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_")
    name = class_facts(model_type).model_class
    return getattr(transformers, name, None) or getattr(importlib.import_module(module), name)


def built(config: dict[str, Any]) -> tuple[Any, int]:
    """transformers' config, and the unique parameters of the model that it builds."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    built_class = model_class(config["model_type"])
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(fields)
    with torch.device("meta"):
        model = built_class(made)
    headless = built_class.__name__.endswith("TextModel")  # the text model of a class with a tower
    head = made.vocab_size * made.hidden_size if headless and not made.tie_word_embeddings else 0
    return made, model.num_parameters() + head - unused(made)


def unused(made: Any) -> int:
    """Rows that transformers allocates for LongCat's experts without a product, and that nothing reads."""
    if made.model_type != "longcat_flash":
        return 0
    return made.num_layers * made.zero_expert_num * 2 * made.expert_ffn_hidden_size * made.hidden_size


def imported(config: dict[str, Any]) -> int:
    """Parameters of the import."""
    return build_inventory(import_hf(json.dumps(config, indent=1), "config.json").loaded.spec).parameters


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(COUNT))
def test_parameters_are_those_that_transformers_builds(model_type: str, seed: int) -> None:
    config = random_config(model_type, seed)
    made, total = built(config)
    assert imported(config) == total
    assert imported(json.loads(made.to_json_string(use_diff=True))) == total
    assert imported(json.loads(made.to_json_string(use_diff=False))) == total


def test_every_model_type_is_drawn() -> None:
    assert set(CONFIGS) == set(ARCHITECTURES)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_table_of_defaults_is_of_this_version(model_type: str) -> None:
    facts = class_facts(model_type)
    assert facts.version == transformers.__version__
    declared = {field.name: field.default for field in dataclasses.fields(transformers.CONFIG_MAPPING[model_type])}
    for name, value in facts.fields.items():
        if isinstance(value, int | float | str) and name != "rope_theta":  # which the table has for each class that rotates
            assert value == declared[name]
