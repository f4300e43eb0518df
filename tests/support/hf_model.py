"""A small model's folder as Hugging Face publishes it: config.json and safetensors with random values."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megaplan.importers.hf import import_hf
from megaplan.inventory.build import build_inventory
from megarun.huggingface.names import NAMES
from megarun.huggingface.rules import weight_rules

SMALL_LLAMA: dict[str, Any] = json.loads((Path(__file__).parent / "doc_files" / "model" / "config.json").read_text(encoding="utf-8"))


def write_model(folder: Path, config: dict[str, Any] = SMALL_LLAMA, *, shards: int = 1) -> dict[str, Any]:
    """Write the folder; its tensors by their names, bf16."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    spec = import_hf(json.dumps(config), "config.json").loaded.spec
    rules = weight_rules(NAMES[config["model_type"]], spec, build_inventory(spec), config)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(rule.shape, generator=generator).div(8).bfloat16() for rule in rules for name in rule.theirs}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return tensors
    places = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tensors
