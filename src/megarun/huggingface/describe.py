"""The files of an exported model that are not weights: a config that is derived from the plan, the run's tokenizer, and a model card."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megaplan.errors import MegaplanError
from megaplan.exporters.hf_config import TYPES, hf_configs
from megaplan.importers.hf import import_hf
from megarun.checkpoint.manifest import Manifest
from megarun.data.identity import TOKENIZER
from megarun.data.tokenizer import end_of_document
from megarun.errors import refusal
from megarun.huggingface.differences import model_differences
from megarun.job.job import Job

TOKENIZER_CONFIG, CARD = "tokenizer_config.json", "README.md"
DERIVED = "config.json, derived from the plan"
MOST_NAMED = 4


def derived_config(job: Job) -> dict[str, Any]:
    """The config of the first model type that reads back as the plan's model.

    Raises:
        MegaplanError: MP664 if no model type matches, with the differences from the closest one.
    """
    closest: list[str] | None = None
    for config in hf_configs(job.spec):
        try:
            imported = import_hf(json.dumps(config), DERIVED)
        except MegaplanError as error:
            found = [each.detail.splitlines()[0] for each in error.diagnostics]
        else:
            found = model_differences(imported, config, job.spec)
        if not found:
            return config
        if closest is None or len(found) < len(closest):
            closest = [f"as {config['model_type']}: {each}" for each in found]
    known = ", ".join(each.name for each in TYPES)
    detail = f"the plan's model has no model type for which a config.json can be written: {known}"
    raise refusal("MP664", "\n".join([detail, *(closest or [])[:MOST_NAMED]]), hints=("--config MODEL/config.json",))


def run_tokenizer(folder: str) -> Path | None:
    """The tokenizer that a run keeps in its folder; None if it has none, or its folder is in a storage.

    Args:
        folder: The run, or one of its checkpoints.
    """
    path = Path(folder)
    return next((found for each in (path, path.parent.parent) if (found := each / TOKENIZER).is_file()), None)


def read_tokenizer_json(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        MegaplanError: MP678 if the file is not a config.
    """
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        detail = f"{file}: no tokenizer: {str(error).splitlines()[0]}"
        raise refusal("MP678", detail, hints=("--tokenizer corpus.tokens",), file=str(file)) from None


def write_tokenizer(file: Path, out: Path, longest: int) -> dict[str, int]:
    """Write a tokenizer as transformers reads it; the fields of a config that name its tokens.

    Args:
        file: `tokenizer.json` of the run.
        out: Folder of the model.
        longest: Tokens of a sequence in training.
    """
    tokenizer = read_tokenizer_json(file)
    (out / TOKENIZER).write_bytes(file.read_bytes())
    end = end_of_document(tokenizer)
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    if end is not None:
        fields["eos_token"] = tokenizer.id_to_token(end)
    (out / TOKENIZER_CONFIG).write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {} if end is None else {"eos_token_id": end, "bos_token_id": end}


def write_card(out: Path, job: Job, manifest: Manifest, config: Mapping[str, Any], num_parameters: int) -> None:
    """Write a model card: the model, its steps and data of training, and how to load it."""
    sequences, length = manifest.global_batch
    losses = manifest.data_progress.losses
    rows = [
        ("Architecture", f"{config['model_type']}, {job.spec.model.num_layers} layers, hidden size {job.spec.model.hidden_size:,}"),
        ("Parameters", f"{num_parameters:,}, {config['dtype']}"),
        ("Training", f"{manifest.step:,} steps of {sequences:,} sequences of {length:,} tokens: {manifest.step * sequences * length:,}"),
        ("Data", ", ".join(f"{file.name} ({file.num_tokens:,} tokens)" for file in manifest.data or ()) or "not recorded"),
        *([("Training loss of the last step", f"{losses[-1]:.4f}")] if losses else []),
        ("Seed", str(manifest.seed)),
        ("Digest of the model", f"`{manifest.model_digest}`"),
        ("Digest of the plan", f"`{manifest.plan_digest}`"),
        ("Trained with", f"megarun, torch {manifest.torch}"),
    ]
    name = job.spec.name or config["model_type"]
    lines = ["---", "library_name: transformers", "tags:", "- megarun", f"- {config['model_type']}", "---", "", f"# {name}", ""]
    lines += ["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows), "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", "", 'model = AutoModelForCausalLM.from_pretrained(".")']
    lines += ['tokenizer = AutoTokenizer.from_pretrained(".")'] if (out / TOKENIZER).is_file() else []
    lines += ["```", "", "Intended use, limits, licence and evaluations are for whoever publishes the model to state."]
    (out / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
