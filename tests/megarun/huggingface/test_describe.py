"""Exports from the run alone: a config that is derived from the plan, the run's tokenizer, and the model card."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from hf_model import write_model

from megaplan import split
from megaplan.errors import MegaplanError
from megaplan.exporters.hf_config import TYPES
from megaplan.plan.make import write_plan
from megarun.checkpoint.full_tensors import full_tensors, tensor_names
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.huggingface.convert import import_weights
from megarun.huggingface.describe import derived_config
from megarun.job.run import read_job

pytestmark = pytest.mark.runtime
SMALL: dict[str, Any] = json.loads((Path(__file__).parents[2] / "megaplan" / "importers" / "small_models.json").read_text(encoding="utf-8"))
CONFIGS = [(each.name, config) for each in TYPES for config, _ in SMALL[each.name] if "E" not in config.get("hybrid_override_pattern", "")]
SIZES = ("model.num_layers=2", "model.hidden_size=32", "model.vocab_size=257", "batch.seq_length=16", "training.steps=2")
ALONE = ("mesh.pp=1", "mesh.dp_shard=1", "schedule.num_microbatches=1")


@pytest.mark.parametrize(("model_type", "config"), CONFIGS, ids=[name for name, _ in CONFIGS])
def test_tensors_of_a_derived_config_are_those_of_the_given_one(model_type: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Perhaps as an earlier type, whose tensors may have other names: they are read back into the same checkpoint."""
    config = {**config, "first_k_dense_replace": 0} if config.get("first_k_dense_replace") else config
    write_model(tmp_path / "model", config)
    plan = tmp_path / "plan.json"
    write_plan(split(str(tmp_path / "model" / "config.json"), "batch.seq_length=16").plan, plan)
    first = import_weights(read_job(str(plan), None), tmp_path / "model", tmp_path / "run").path
    out = tmp_path / "out"
    assert run(["checkpoint", "export", str(first), "--format", "hf", "-o", str(out)]) == 0
    assert model_type in json.loads((out / "config.json").read_text())["model_type"] or model_type == "qwen3_moe"
    again = import_weights(read_job(str(plan), None), out, tmp_path / "again").path
    ours, theirs = (dict(full_tensors(each, tensor_names(each))) for each in (first, again))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name].float(), theirs[name].float())] == []


def test_a_run_is_exported_and_sampled_without_other_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text() * 4)
    tokens = tmp_path / "small.tokens"
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tokens)
    plan, folder, out = tmp_path / "plan.json", tmp_path / "run", tmp_path / "out"
    heads = "model.attention={kind: gqa, num_heads: 4, num_kv_heads: 2, head_dim: 8}"
    write_plan(split("plans/llama-3.1-8b.yaml", *SIZES, *ALONE, heads).plan, plan)
    assert run(["train", str(plan), "--data", str(tokens), "--out", str(folder), "--save-every", "2"]) == 0
    for file in tmp_path.glob("small.tokens*"):
        file.unlink()
    capfd.readouterr()
    assert run(["sample", str(folder), "class", "--tokens", "4", "--seed", "1"]) == 0
    assert capfd.readouterr().out.startswith("class")
    assert run(["checkpoint", "export", str(folder), "--format", "hf", "--dtype", "bf16", "-o", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["eos_token_id"]) == ("llama", "bfloat16", 256)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    card = (out / "README.md").read_text()
    for said in ("| Training | 2 steps of", "small.tokens (", read_job(str(plan), None)[1].model_digest):
        assert said in card


def test_a_model_of_no_type_is_named_by_what_differs() -> None:
    plan = split("plans/llama-3.1-8b.yaml", "model.attention.gate=true").plan
    with pytest.raises(MegaplanError) as caught:
        derived_config(read_job(plan, None)[0])
    (found,) = caught.value.diagnostics
    assert found.code == "MP664"
    assert "as llama: model.attention.gate = null in the config, true in the plan" in found.detail
    assert found.hints[0] == "--config MODEL/config.json"
