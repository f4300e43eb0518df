"""Grouping of rows of fused tensors, and the names under which the tensors of a model of several parts are found."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaplan import split
from megaplan.importers.hf import text_fields
from megarun.huggingface.changes import to_ours, to_theirs
from megarun.huggingface.convert import export_weights, import_weights
from megarun.huggingface.names import NAMES
from megarun.huggingface.rules import Ours, Rule, weight_rules
from megarun.job.run import read_job

pytestmark = pytest.mark.runtime
GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "sliding_window": 8,
}  # fmt: skip


def test_rows_of_a_group_are_together() -> None:
    """Two groups of theirs, each with a row of q, one of k and two of v: ours are q and k in one tensor, and v in another."""
    rule = Rule((Ours("qk", (4, 1), parts=2), Ours("v", (4, 1))), ("qkv",), (8, 1), groups=2)
    theirs = torch.tensor([[10], [20], [30], [31], [11], [21], [32], [33]])
    qk, v = to_ours(rule, [theirs])
    assert qk.flatten().tolist() == [10, 11, 20, 21]
    assert v.flatten().tolist() == [30, 31, 32, 33]
    assert torch.equal(to_theirs(rule, [qk, v])[0], theirs)


def test_equal_parts_of_ours_are_tensors_of_theirs() -> None:
    rule = Rule((Ours("qk", (4, 1), parts=2),), ("q", "k"), (2, 1))
    qk = torch.tensor([[1], [2], [3], [4]])
    q, k = to_theirs(rule, [qk])
    assert (q.flatten().tolist(), k.flatten().tolist()) == ([1, 2], [3, 4])
    assert torch.equal(to_ours(rule, [q, k])[0], qk)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_text_model_of_several_parts(prefix: str, tmp_path: Path) -> None:
    """Other parts are left and named; the export is the text model alone."""
    model = tmp_path / "model"
    model.mkdir()
    config = model / "config.json"
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": GEMMA, "vision_config": {}}))
    job, plan = read_job(split(str(config), batch__seq_length=8, model__towers=None).plan, None)
    rules = weight_rules(NAMES["gemma3_text"], job.spec, job.inventory, text_fields(json.loads(config.read_text())))
    own = {name: torch.randn(rule.shape) for rule in rules for name in rule.theirs}
    inside = {prefix + (name if prefix == "language_model." else name.removeprefix("model.")): tensor for name, tensor in own.items()}
    save_file(inside | {"vision_tower.patch.weight": torch.ones(2)}, model / "model.safetensors", {"format": "pt"})
    moved = import_weights((job, plan), model, tmp_path / "run")
    assert moved.left == ("vision_tower.patch.weight",)
    exported = export_weights(moved.path, config, tmp_path / "export").path
    written = load_file(exported / "model.safetensors")
    assert written.keys() == own.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in own.items())
    assert json.loads((exported / "config.json").read_text())["model_type"] == "gemma3_text"
