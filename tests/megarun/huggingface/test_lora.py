"""Adapters on imported weights: a run starts from a base, its checkpoints resume, and an export has the adapters merged."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from hf_model import SMALL_LLAMA, write_model

from megakernels import unpacked
from megakernels.ops.packed_weight.reference import join, pack
from megaplan import split
from megaplan.plan.make import write_plan
from megaplan.plan.read import read_plan
from megarun.checkpoint.adapters import is_adapter
from megarun.checkpoint.full_tensors import full_tensors, tensor_names
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.engine.build import build_stage, materialise
from megarun.job.job import Job
from megarun.parallel.groups.packed import PARTS

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-64")]
FP32 = [f"precision.{role}=fp32" for role in ("params", "grads", "master", "moments", "reduce")]
LORA = ("lora.rank=3", "lora.alpha=6.0")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(Path(__file__).read_text() * 4)
    tokenize(read_corpus(folder), TokenizerKind.BYTES, 257, folder.parent / "small.tokens")
    return folder.parent / "small.tokens"


def plan_at(folder: Path, name: str, *changes: str) -> str:
    path = folder / f"{name}.json"
    config = str(folder / "model" / "config.json")
    changed = ("batch.seq_length=16", "training.steps=4", "training.learning_rate=0.01", *FP32, *changes)
    write_plan(split(config, *changed).plan, path)
    return str(path)


def logits_of(plan: str, checkpoint: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the whole model in one process, with a checkpoint's parameters."""
    job = Job.from_plan(read_plan(plan))
    stage = build_stage(job.spec, job.inventory, job.layout.slots[0])
    materialise(stage, torch.device("cpu"))
    names = [name for name, _ in stage.named_parameters()]
    stage.load_state_dict(dict(full_tensors(checkpoint, names)), strict=True)
    with torch.no_grad():
        found: torch.Tensor = stage(tokens)
    return found


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08}"


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line and "step" in line}


def test_a_merged_export_has_the_logits_of_the_adapted_model(tmp_path: Path, token_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The way from a base's weights, through training, to a folder without adapters; the base itself has not moved."""
    tensors = write_model(tmp_path / "model")
    plan, base = plan_at(tmp_path, "adapted", *LORA, "host.kernels=reference"), plan_at(tmp_path, "base", "host.kernels=reference")
    assert run(["checkpoint", "import", plan, str(tmp_path / "model"), "-o", str(tmp_path / "start")]) == 0
    start = str(step(tmp_path / "start", 0))
    assert not any(is_adapter(name) for name in tensor_names(Path(start)))
    words = ["train", plan, "--data", str(token_file), "--save-every", "2"]
    assert run([*words, "--out", str(tmp_path / "run"), "--resume", start]) == 2
    assert "--weights-only" in capfd.readouterr().err
    assert run([*words, "--out", str(tmp_path / "run"), "--resume", start, "--weights-only"]) == 0
    trained = step(tmp_path / "run", 4)
    before, after = (dict(full_tensors(path, tensor_names(Path(start)))) for path in (Path(start), trained))
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    assert any(bool(found.any()) for name, found in full_tensors(trained, tensor_names(trained)) if name.endswith(".lora_b"))
    states = [name for name in tensor_names(trained) if name.startswith("optimizer.")]
    assert states
    assert all(".lora_" in name for name in states)

    out = ["-o", str(tmp_path / "out"), "--format", "hf", "--config", str(tmp_path / "model" / "config.json"), "--dtype", "fp32"]
    assert run(["checkpoint", "export", str(tmp_path / "run"), *out]) == 0
    assert run(["checkpoint", "import", base, str(tmp_path / "out"), "-o", str(tmp_path / "merged")]) == 0
    tokens = torch.randint(0, SMALL_LLAMA["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(0))
    adapted = logits_of(plan, trained, tokens)
    merged = logits_of(base, step(tmp_path / "merged", 0), tokens)
    plain = logits_of(base, Path(start), tokens)
    assert (adapted - merged).abs().max() <= 1e-5 * adapted.abs().max()
    assert (adapted - plain).abs().max() > 1e-3 * adapted.abs().max()
    assert len(tensors) == sum(1 for name in tensor_names(Path(start)))


def test_a_run_of_adapters_resumes(tmp_path: Path, token_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same losses as without a stop; a plan that would drop or rescale the adapters is refused by name."""
    write_model(tmp_path / "model")
    plan = plan_at(tmp_path, "adapted", *LORA)
    words = ["train", plan, "--data", str(token_file), "--save-every", "2"]
    assert run([*words, "--out", str(tmp_path / "whole")]) == 0
    assert run([*words, "--out", str(tmp_path / "again"), "--resume", str(step(tmp_path / "whole", 2))]) == 0
    whole, again = losses(tmp_path / "whole"), losses(tmp_path / "again")
    assert {number: whole[number] for number in (3, 4)} == again
    for changes, said in (
        ((), "lora.rank = null, the checkpoint's = 3"),
        (("lora.rank=3", "lora.alpha=9.0"), "lora.alpha = 9, the checkpoint's = 6"),
    ):
        other = plan_at(tmp_path, f"other{len(changes)}", *changes)
        capfd.readouterr()
        given: list[Any] = ["train", other, "--data", str(token_file), "--out", str(tmp_path / "other")]
        assert run([*given, "--resume", str(step(tmp_path / "whole", 4)), "--weights-only"]) == 2
        assert said in capfd.readouterr().err


def test_a_base_in_four_bits_is_packed_where_it_is_loaded(tmp_path: Path, token_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows of a run's checkpoint are those of the imported weights, an export has their matrices, and other blocks are refused."""
    write_model(tmp_path / "model")
    base = ("lora.base=nf4", "lora.base_block=4", "host.kernels=reference")
    plan, plain = plan_at(tmp_path, "packed", *LORA, *base), plan_at(tmp_path, "base", "host.kernels=reference")
    assert run(["checkpoint", "import", plan, str(tmp_path / "model"), "-o", str(tmp_path / "start")]) == 0
    start, job = step(tmp_path / "start", 0), Job.from_plan(read_plan(plan))
    words = ["train", plan, "--data", str(token_file), "--save-every", "2"]
    assert run([*words, "--out", str(tmp_path / "run"), "--resume", str(start), "--weights-only"]) == 0
    assert run([*words, "--out", str(tmp_path / "again"), "--resume", str(step(tmp_path / "run", 2))]) == 0
    whole, again = losses(tmp_path / "run"), losses(tmp_path / "again")
    assert {number: whole[number] for number in (3, 4)} == again

    trained, packing = step(tmp_path / "run", 4), job.spec.packing
    assert packing is not None
    saved, given = (dict(full_tensors(path, tensor_names(path))) for path in (trained, start))
    weight = "layers.0.q_proj.weight"
    assert weight not in saved
    parts = pack(given[weight], packing)
    assert all(torch.equal(saved[f"{weight}.{name}"], part) for name, part in zip(PARTS, parts, strict=True))
    assert torch.equal(saved["embedding.weight"], given["embedding.weight"])

    out = ["-o", str(tmp_path / "out"), "--format", "hf", "--config", str(tmp_path / "model" / "config.json"), "--dtype", "fp32"]
    assert run(["checkpoint", "export", str(tmp_path / "run"), *out]) == 0
    assert run(["checkpoint", "import", plain, str(tmp_path / "out"), "-o", str(tmp_path / "merged")]) == 0
    merged = dict(full_tensors(step(tmp_path / "merged", 0), [weight]))[weight].float()
    a, b = (saved[f"layers.0.q_proj.{name}"].float() for name in ("lora_a", "lora_b"))
    matrix = unpacked(join(*parts), given[weight].shape[1], packing, torch.float32)
    assert (merged - (matrix + 2.0 * b @ a)).abs().max() <= 1e-6

    other = plan_at(tmp_path, "other", *LORA, *base, "lora.base_block=8")
    capfd.readouterr()
    assert run(["train", other, "--data", str(token_file), "--out", str(tmp_path / "other"), "--resume", str(trained)]) == 2
    assert "lora.base_block = 8, the checkpoint's = 4" in capfd.readouterr().err
