"""Weights of Hugging Face models: into a checkpoint, through a training run, and back."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from hf_model import SMALL_LLAMA, write_model

from megaplan.errors import MegaplanError
from megaplan.plan.make import write_plan
from megarun.checkpoint.full_tensors import full_tensors, tensor_names
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.huggingface.convert import export_weights, import_weights
from megarun.huggingface.files import SHARD_BYTES, Group, write_shards
from megarun.huggingface.names import NAMES
from megarun.job.run import read_job

pytestmark = pytest.mark.runtime
SMALL: dict[str, Any] = json.loads((Path(__file__).parents[2] / "megaplan" / "importers" / "small_models.json").read_text(encoding="utf-8"))


def plan_of(model: Path, *changes: str) -> Path:
    """A plan of a model's folder."""
    from megaplan import split  # noqa: PLC0415

    path = model.parent / "plan.json"
    write_plan(split(str(model / "config.json"), "batch.seq_length=16", *changes).plan, path)
    return path


def stored(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("model_type", NAMES)
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_model_type_round_trips(model_type: str, which: int, tmp_path: Path) -> None:
    """Bit by bit and in its own dtype; every tensor of ours is read from a different place of theirs."""
    config = SMALL[model_type][which][0]
    if "E" in config.get("hybrid_override_pattern", "") or "moe" in config.get("layers_block_type", ()):
        pytest.skip("its experts have a correction, which no tensor of ours holds")
    tensors = write_model(tmp_path / "model", config, shards=1 + which)
    plan = plan_of(tmp_path / "model")
    moved = import_weights(read_job(str(plan), None), tmp_path / "model", tmp_path / "run")
    ours = dict(full_tensors(moved.path, tensor_names(moved.path)))
    assert sum(tensor.numel() for tensor in ours.values()) == sum(tensor.numel() for tensor in tensors.values())
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    export_weights(moved.path, tmp_path / "model" / "config.json", tmp_path / "back")
    found = stored(tmp_path / "back")
    constants = {name for name in found if name.endswith((".act_fn.beta", ".act_fn.eps"))}  # buffers of transformers that no run changes
    assert found.keys() - constants == tensors.keys()
    assert [name for name in tensors if not torch.equal(found[name], tensors[name])] == []


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(Path(__file__).read_text() * 4)
    tokenize(read_corpus(folder), TokenizerKind.BYTES, 257, folder.parent / "small.tokens")
    return folder.parent / "small.tokens"


def test_a_run_begins_with_the_weights(tmp_path: Path, token_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The commands of the guide: the first loss is that of the weights, and what is exported is what was trained."""
    tensors = write_model(tmp_path / "model")
    plan = str(plan_of(tmp_path / "model", "training.steps=2"))
    assert run(["checkpoint", "import", plan, str(tmp_path / "model"), "-o", str(tmp_path / "start")]) == 0
    said = capfd.readouterr().out
    start = str(tmp_path / "start" / "checkpoints" / "step-00000000")
    assert f"--resume {start} --weights-only" in said
    words = ["train", plan, "--data", str(token_file), "--out", str(tmp_path / "run"), "--save-every", "2"]
    assert run([*words, "--resume", start]) == 2
    assert "--weights-only" in capfd.readouterr().err
    assert run([*words, "--resume", start, "--weights-only"]) == 0
    out = ["-o", str(tmp_path / "out"), "--format", "hf", "--config", str(tmp_path / "model" / "config.json")]
    assert run(["checkpoint", "export", str(tmp_path / "run"), *out, "--dtype", "bf16"]) == 0
    found = stored(tmp_path / "out")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    }
    moved = {name: (found[name].float() - tensors[name].float()).abs().max().item() for name in tensors}
    assert 0 < max(moved.values()) < 0.1
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**SMALL_LLAMA, "dtype": "bfloat16"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_layout_of_the_plan_does_not_matter(tmp_path: Path) -> None:
    """Checkpoints hold whole tensors: the same of a plan over four ranks."""
    write_model(tmp_path / "model")
    whole = import_weights(read_job(str(plan_of(tmp_path / "model")), None), tmp_path / "model", tmp_path / "one").path
    spread = read_job(str(plan_of(tmp_path / "model", "mesh.tp=2", "mesh.dp_shard=2")), None)
    other = import_weights(spread, tmp_path / "model", tmp_path / "four").path
    assert tensor_names(whole) == tensor_names(other)
    pairs = zip(full_tensors(whole, tensor_names(whole)), full_tensors(other, tensor_names(other)), strict=True)
    assert all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in pairs)


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


WRONG: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_without("model.norm.weight"), "model.norm.weight is missing"),
    (_with("model.norm.weight", 31), "model.norm.weight is [31], the plan's final_norm.weight needs [32]"),
    (_with("model.layers.0.self_attn.q_proj.weight_scale", 1), "model.layers.0.self_attn.q_proj.weight_scale [1] belongs to no tensor"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_tensors_that_do_not_fit_are_named(change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "model")
    change(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(MegaplanError) as refused:
        import_weights(read_job(str(plan_of(tmp_path / "model")), None), tmp_path / "model", tmp_path / "run")
    (found,) = refused.value.diagnostics
    assert found.code == "MP663"
    assert said in found.detail
    assert not (tmp_path / "run").exists()


def test_what_no_model_reads_is_left_out_and_named(tmp_path: Path) -> None:
    """A copy of a tied head, angles, and a prediction module behind the last layer."""
    tensors = write_model(tmp_path / "model")
    more = ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.eh_proj.weight")
    save_file({**tensors, **{name: torch.zeros(3) for name in more}}, tmp_path / "model" / "model.safetensors")
    moved = import_weights(read_job(str(plan_of(tmp_path / "model")), None), tmp_path / "model", tmp_path / "run")
    assert moved.left == tuple(sorted(more))
    assert moved.num_tensors == len(tensors)


def test_a_config_of_another_model_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The import is refused by the key that differs."""
    write_model(tmp_path / "model")
    plan = plan_of(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL_LLAMA | {"rope_theta": 5e5}))
    assert run(["checkpoint", "import", str(plan), str(tmp_path / "model"), "-o", str(tmp_path / "run")]) == 2
    assert "model.attention.rope_theta = 500000.0 in the config, 10000.0 in the plan" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "code"), [("{}", "MP663"), ("[" * 100_000, "MP663"), ('{"weight_map": {"a": "../model.safetensors"}}', "MP663")]
)
def test_an_index_that_is_wrong(text: str, code: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    plan = plan_of(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(MegaplanError) as refused:
        import_weights(read_job(str(plan), None), tmp_path / "model", tmp_path / "run")
    assert [found.code for found in refused.value.diagnostics] == [code]


def test_shards_are_filled_in_order(tmp_path: Path) -> None:
    """A group that is larger than the limit has one of its own; the index names the file of each tensor."""
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in (("a", 4), ("b", 4), ("c", 40), ("d", 4))}
    groups = [Group({name: tensor.nbytes}, partial(dict, [(name, tensor)])) for name, tensor in tensors.items()]
    files = write_shards(tmp_path, groups, 52, limit=10)
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": files[0], "b": files[0], "c": files[1], "d": files[2]}
    assert index["metadata"] == {"total_parameters": 52, "total_size": 52}
    assert SHARD_BYTES > 10


def test_an_export_by_inventory_names_says_where_it_comes_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model")
    plan = plan_of(tmp_path / "model")
    assert run(["checkpoint", "import", str(plan), str(tmp_path / "model"), "-o", str(tmp_path / "run")]) == 0
    assert run(["checkpoint", "export", str(tmp_path / "run"), "-o", str(tmp_path / "weights.safetensors")]) == 0
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        metadata = file.metadata()
    digest = json.loads(plan.read_text())["digests"]["model"]
    assert metadata == {"format": "pt", "megarun.step": "0", "megarun.model_digest": digest}
    capfd.readouterr()
