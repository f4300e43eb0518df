"""`megaplan import hf` and `megaplan estimate config.json`: the same numbers, and their exit statuses."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from hf_samples import GONE, MODELS, config, text

from megaplan.cli.main import run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one model's config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


def estimated(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert run(["estimate", *words, "--json"]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    del document["diagnostics"]  # they name the config and the fields that are not imported
    return document


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "DeepSeek-V2-Lite", "granite-4.0-h-tiny"])
@pytest.mark.parametrize("overrides", [[], ["--set", "mesh.dp_shard=8", "--set", "batch.seq_length=8192"]], ids=["bare", "set"])
def test_a_spec_file_and_its_config_have_the_same_estimate(
    name: str, overrides: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(text(config(name)), encoding="utf-8")
    assert run(["import", "hf", "config.json", "-o", "spec.yaml", *overrides]) == 0
    from_config = estimated(["config.json", *overrides], capsys)
    assert estimated(["spec.yaml"], capsys) == from_config
    assert from_config["totals"]["parameters"] == MODELS[name]["total_params"]


def test_a_spec_file_says_what_it_does_not_carry(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(text(config("granite-4.0-h-tiny")), encoding="utf-8")
    assert run(["import", "hf", "config.json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# Imported from config.json, model_type granitemoehybrid.\n# Not imported: embedding_multiplier = ")
    assert "warning[MP820]" in printed.err


def test_a_file_is_replaced_by_force_alone(folder: Path) -> None:
    (folder / "config.json").write_text(text(config("Llama-3.2-1B")), encoding="utf-8")
    words = ["import", "hf", "config.json", "-o", "spec.yaml"]
    assert [run(words), run(words), run([*words, "--force"])] == [0, 2, 0]


def test_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text(config("Qwen3-8B")).encode())))
    assert run(["import", "hf", "-"]) == 0
    assert "# Imported from <stdin>, model_type qwen3." in capsys.readouterr().out


@pytest.mark.parametrize("command", [["import", "hf"], ["estimate"]])
def test_a_refused_config_exits_with_2(command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(text(config("Llama-3.1-8B", vocab_size="many")), encoding="utf-8")
    assert run([*command, "config.json"]) == 2
    assert "error[MP804]" in capsys.readouterr().err


def test_files_that_are_no_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "large.json").write_text('{"model_type": "llama", "x": "' + "x" * 2**20 + '"}', encoding="utf-8")
    (folder / "list.json").write_text("[1]", encoding="utf-8")
    for name, code in (("large.json", "MP104"), ("list.json", "MP801"), ("absent.json", "MP101"), (".", "MP102")):
        assert run(["import", "hf", name]) == 2
        assert f"error[{code}]" in capsys.readouterr().err
    assert run(["estimate", "large.json"]) == 2
    assert "error[MP104]" in capsys.readouterr().err


def test_nothing_is_written_where_the_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "zamba2"}', encoding="utf-8")
    assert run(["import", "hf", "config.json", "-o", "spec.yaml"]) == 2
    assert not (folder / "spec.yaml").exists()


def test_a_name_of_the_local_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The snapshot that the branch main points to; without a snapshot, the command to get it."""
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    model = folder / "home/hub/models--org--tiny"
    for commit, layers in (("abc1", 4), ("def2", 2)):
        (model / "snapshots" / commit).mkdir(parents=True)
        fields = text(config("Qwen3-8B", num_hidden_layers=layers, max_window_layers=layers))
        (model / "snapshots" / commit / "config.json").write_text(fields, encoding="utf-8")
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc1", encoding="utf-8")
    assert run(["import", "hf", "org/tiny"]) == 0
    printed = capsys.readouterr().out
    assert "name: tiny\n" in printed
    assert "num_layers: 8\n" in printed
    (model / "refs/main").unlink()  # otherwise the newest one with a file
    os.utime(model / "snapshots/abc1/config.json", (1, 1))
    (model / "snapshots/later/config.json").mkdir(parents=True)
    assert run(["import", "hf", "org/tiny"]) == 0
    assert "num_layers: 4\n" in capsys.readouterr().out
    assert run(["estimate", "org/other"]) == 2
    assert "hf download org/other config.json" in capsys.readouterr().err


def test_strict_refuses_absent_and_unknown_fields(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(text(config("Qwen3-8B", head_dim=GONE, num_registers=4)), encoding="utf-8")
    assert run(["import", "hf", "config.json"]) == 0
    assert "note[MP823]" in capsys.readouterr().err
    assert run(["import", "hf", "config.json", "--strict"]) == 2
    printed = capsys.readouterr().err
    assert "error[MP803]" in printed
    assert "error[MP806]" in printed
