"""A job from a model, a number of GPUs and a device; a project's settings; the hub."""

import io
import json
import shlex
from pathlib import Path

import pytest

import megaplan
from megaplan.api.size import FREE_PERCENT, JobSize, load_sized
from megaplan.cli.main import run
from megaplan.devices import canonical_name

MODEL = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 4096, "tie_word_embeddings": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "use_sliding_window": False, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def estimated(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert run(["estimate", *words, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_a_model_on_gpus_has_a_layout_of_a_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(["model", "--gpus", "8", "--device", "H100", "--global-batch", "64", "--seq", "2048"], capsys)
    shown = json.dumps(found)
    assert '"h100-sxm"' in shown
    note = next(item for item in found["diagnostics"] if item["code"] == "MP824")
    assert note["hints"][0] == "megaplan search model/config.json --devices 8 --device H100 --global-batch 64 --seq 2048"
    searched = run([*shlex.split(note["hints"][0])[1:], "--vary", "recompute,batch", "--json"])
    rows = json.loads(capsys.readouterr().out)["best"]
    assert searched == 0
    assert max(row["tokens_per_second_per_device"] for row in rows) >= 0.99 * found["time"]["tokens_per_second_per_device"]
    assert run(["estimate", "model", "--gpus", "8"]) == 0
    printed = capsys.readouterr()
    assert "8 ranks" in printed.out
    assert "131,072 tokens per step" in printed.out  # 4 sequences of 4,096 tokens per GPU
    assert "adamw" in printed.out
    assert "global batch 32, 4 sequences per GPU, until --global-batch sets it" in printed.err


def test_a_stated_mesh_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "model", "--gpus", "16", "--set", "mesh.tp=2", "--global-batch", "32"]) == 0
    printed = capsys.readouterr()
    assert "16 ranks: dp_shard 8 tp 2" in printed.out
    assert "4 microbatches of 1 sequence" in printed.out
    for words, hint in (
        (["--gpus", "15", "--set", "mesh.tp=2"], "--gpus 14"),
        (["--gpus", "16", "--set", "mesh.tp=2", "--global-batch", "30"], "--global-batch 32"),
    ):
        assert run(["estimate", "model", *words]) == 2
        assert f"hint: {hint}\n" in capsys.readouterr().err


KEPT = {
    "recompute.default=full": lambda spec: {spec.recompute.of(letter) for letter in "AD"} == {"full"},
    "recompute={default: full}": lambda spec: {spec.recompute.of(letter) for letter in "AD"} == {"full"},
    "recompute.blocks={D: selective}": lambda spec: (spec.recompute.of("A"), spec.recompute.of("D")) == ("none", "selective"),
    "batch.micro_batch_size=2": lambda spec: spec.batch.micro_batch_size == 2,
    "batch={micro_batch_size: 2, seq_length: 4096}": lambda spec: spec.batch.micro_batch_size == 2,
    "sharding.reshard_after_forward=false": lambda spec: not spec.sharding.reshard_after_forward,
    "host.kernels=reference": lambda spec: spec.host.kernels == "reference",
    "precision.grads=bf16": lambda spec: spec.precision.grads == "bf16",
    "schedule.steps_per_update=4": lambda spec: spec.schedule.steps_per_update == 4,
}
"""Changes that a quick search keeps, each with what the spec then has."""


@pytest.mark.parametrize("change", KEPT)
def test_what_a_change_states_is_kept_by_the_quick_search(change: str, folder: Path) -> None:
    found = load_sized("model", [change], JobSize(gpus=8, global_batch=64))
    assert KEPT[change](found.spec)
    assert (found.spec.mesh.world_size, found.spec.global_batch_size) == (8, 64)
    (note,) = (each for each in found.read_diagnostics if each.code == "MP824")
    words = shlex.split(note.hints[0])
    assert change in words  # with --fix if a search would decide it
    pasted = [word for word in shlex.split(note.hints[1]) if word != "--set"]
    assert megaplan.estimate("model", change, *pasted).job.spec == found.spec


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--gpus", "16", "--set", "mesh.dp_shard=8"], "--gpus 8"),
        (["--gpus", "16", "--set", "mesh.dp_shard=3", "--set", "mesh.dp_replicate=2"], "--gpus 6"),
        (["--gpus", "8", "--set", "mesh={tp: 2, dp_shard: 8}"], "--gpus 16"),
        (["--gpus", "8", "--global-batch", "64", "--set", "schedule.num_microbatches=8"], "--set mesh.dp_shard=8"),
        (
            ["--gpus", "8", "--global-batch", "64", "--set", "mesh.dp_shard=8", "--set", "schedule.num_microbatches=4"],
            "--global-batch 32",
        ),
        (["--gpus", "8", "--global-batch", "64", "--set", "schedule.steps_per_update=3"], "--global-batch 66"),
    ],
)
def test_a_size_that_contradicts_what_a_change_states_is_refused(
    words: list[str], hint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", "model", *words]) == 2
    printed = capsys.readouterr().err
    assert "error[MP495]" in printed
    assert f"hint: {hint}\n" in printed


@pytest.mark.parametrize(
    "words",
    [
        "--gpus 1 --device h100",
        "--gpus 8 --device h100 --seq 1000000",
        "--gpus 2 --device h100 --seq 65536 --set mesh.tp=2",
        "--gpus 4 --device h100 --seq 400000 --global-batch 8",
    ],
)
def test_hints_for_a_stated_size_work_when_pasted(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["hidden_size=4096", "mlp.ffn_hidden_size=12288", "attention.num_heads=32", "num_layers=72"]
    command = ["estimate", "model", *(word for text in large for word in ("--set", f"model.{text}")), *shlex.split(words)]
    assert run(command) == 1
    hints = [line.removeprefix("hint: ") for line in capsys.readouterr().err.splitlines() if line.startswith("hint: --set") and "#" in line]
    assert hints
    for hint in hints:
        options, _, promised = hint.partition("   # ")
        ranks = int(promised.partition(" on ")[2].split()[0].replace(",", "")) if " GPUs instead of " in promised else int(words.split()[1])
        assert run([*command, *shlex.split(options)]) == (0 if "leaves" in promised else 1)
        printed = capsys.readouterr().out
        assert f"the largest peak is {promised.removeprefix('peak ').partition(',')[0]}," in " ".join(printed.split())
        assert f"\n  {ranks:,} rank" in printed


def test_a_mesh_of_more_ranks_than_a_divisor_is_looked_for(folder: Path) -> None:
    for gpus in (1536, 4096, 12_288):
        spec = load_sized("model", ["device.name=gb200"], JobSize(gpus=gpus, global_batch=gpus)).spec
        assert (spec.mesh.world_size, spec.mesh.data_ranks) == (gpus, gpus)


def test_the_settings_of_a_project(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pyproject.toml").write_text('[tool.megaplan]\ndevice = "B200"\ngpus = 4\nprice = 3.5\n', encoding="utf-8")
    assert run(["estimate", "model"]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks" in printed
    assert "b200: " in printed
    assert "cost: 14.00 an hour on 4 devices, " in printed
    assert run(["estimate", "model", "--gpus", "2", "--device", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks" in printed
    assert "h200: " in printed
    (folder / "megaplan.toml").write_text("devices = 4\n", encoding="utf-8")
    assert run(["estimate", "model"]) == 2
    assert "error[MP144]" in capsys.readouterr().err


def test_a_quantised_models_config_of_megabytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = {"quant_method": "fp8", "ignored_layers": [f"model.layers.{index}.mlp.gate" for index in range(60_000)]}
    (folder / "large.json").write_text(json.dumps({**MODEL, "quantization_config": modules}), encoding="utf-8")
    assert estimated(["large.json"], capsys)["totals"] == estimated(["model"], capsys)["totals"]
    (folder / "larger.json").write_text(json.dumps({**MODEL, "x": "x" * 2**20}), encoding="utf-8")
    assert run(["estimate", "larger.json"]) == 2
    assert "error[MP104]" in capsys.readouterr().err


def test_a_name_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "org/small"]) == 2
    assert "hint: megaplan estimate org/small --fetch" in capsys.readouterr().err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run(["estimate", "org/small", "--fetch"]) == 2
    assert "http://127.0.0.1:9/org/small/resolve/main/config.json was not reached" in capsys.readouterr().err
    kept = folder / "hub/models--org--small/snapshots/0123abcd"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    assert run(["estimate", "org/small", "--fetch", "--gpus", "2"]) == 0


def test_a_layout_that_fills_the_gpus_comes_after_one_that_does_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model", "--gpus", "8", "--device", "h100-sxm", "--global-batch", "64"]
    fastest = estimated(words, capsys)
    peak = max(rank["peak_bytes"] for rank in fastest["ranks"])
    reserve = fastest["device"]["capacity_bytes"] - fastest["device"]["usable_bytes"]
    capacity = int((peak + reserve) * 1.01)  # the fastest layout still fits, and fills the device
    tight = estimated([*words, "--set", f"device.capacity={capacity}"], capsys)
    assert tight["fits"]
    assert all(100 * rank["headroom_bytes"] >= FREE_PERCENT * capacity for rank in tight["ranks"])
    assert max(rank["peak_bytes"] for rank in tight["ranks"]) < peak
    assert not estimated([*words, "--set", f"device.capacity={reserve + peak // 100}"], capsys)["fits"]


def test_a_search_over_layouts_of_a_model(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ["--vary", "recompute", "--seconds", "2", "--processes", "1"]
    assert run(["search", "model", "--devices", "2,8", *quick]) == 0
    printed = capsys.readouterr()
    assert "32 sequences per step" in printed.out  # 4 sequences for each of 8 GPUs, on 2 as well
    assert "note[MP821]" in printed.err
    assert "hint: --global-batch 32 --seq 4096\n" in printed.err
    assert run(["search", "model", "--devices", "8", "--global-batch", "16", "--seq", "512", *quick]) == 0
    printed = capsys.readouterr()
    assert "16 sequences per step" in printed.out
    assert "MP821" not in printed.err
    assert "batch.seq_length=512" in printed.out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(MODEL).encode())))
    assert run(["search", "-", "--devices", "2", *quick, "--json"]) == 0
    printed = capsys.readouterr()
    assert [each["code"] for each in json.loads(printed.out)["diagnostics"]] == ["MP821"]
    assert "global batch 8, 4 sequences per GPU" in printed.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(MODEL).encode())))
    assert run(["search", "-", "--devices", "2,4", "--host", "torchtitan", *quick, "--json"]) == 0  # read once for all of them
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["searches"]) == 2
    assert [each["code"] for each in json.loads(printed.out)["diagnostics"]] == ["MP821"]
    found = megaplan.search("model", devices=2, vary=["recompute"], processes=1, seconds=2)
    assert found.job.spec.global_batch_size == 8
    assert [each.code for each in found.job.read_diagnostics] == ["MP821"]
    assert megaplan.search("model", "schedule.num_microbatches=6", devices=2, vary=[], processes=1).job.spec.global_batch_size == 6


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("h800", "h800-sxm"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb"),
        ("A100", "a100-80gb"),
        ("NVIDIA GB200", "gb200"),
        ("rtx_pro", "rtx-pro-6000"),
    ],
)
def test_names_of_devices(said: str, name: str) -> None:
    assert canonical_name(said) == name


@pytest.mark.parametrize("said", ["gb", "h20-3e", "b2", "h"])
def test_a_name_of_several_devices_or_none_is_kept(said: str) -> None:
    assert canonical_name(said) == said
