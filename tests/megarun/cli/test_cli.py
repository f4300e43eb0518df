"""`megarun train` as a user runs it: a plan file, a token file, alone and under torchrun; and every way it can refuse."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.token_file import TokenFile
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = pytest.mark.runtime
FOLDER = Path(__file__).parents[1]
FAILING = """
import os, sys
import megarun.data.batches as batches
real = batches.Batches.at
def at(self, step):
    if step == 2 and os.environ["RANK"] == "1":
        raise OSError("the disk was removed")
    return real(self, step)
batches.Batches.at = at
from megarun.cli.main import run
sys.exit(run())
"""


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of this repository's own source."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("".join(path.read_text() for path in sorted(FOLDER.glob("*/test_*.py"))))
    path = folder.parent / "small.tokens"
    tokenize(read_corpus(folder), TokenizerKind.BYTES, 257, path)
    return path


@pytest.fixture
def plan_file(tmp_path: Path, spec_with: Any) -> Callable[..., str]:
    """Write the small spec, changed, as a plan."""

    def write(overrides: dict[str, Any]) -> str:
        settings = {"model.vocab_size": 257, "schedule.num_microbatches": 4, "training.steps": 3, **overrides}
        path = tmp_path / "plan.json"
        write_plan(make_plan(Spec.model_validate(spec_with(settings))), path)
        return str(path)

    return write


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def records(folder: Path) -> list[dict[str, Any]]:
    """Lines of steps alone."""
    return [line for line in lines(folder) if "step_seconds" in line]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run and return the error's text: exit 2, nothing on stdout, no traceback."""
    assert run(list(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def test_one_process_trains_from_a_plan(
    tmp_path: Path, token_file: Path, plan_file: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics a step, a summary on stdout; the same command again gives the same losses, another seed others."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plan = plan_file({"training.steps": 12})
    assert run(["train", plan, "--data", str(token_file), "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr()
    assert "loss, first and last" in said.out
    assert "step 12/12" in said.err
    found = records(tmp_path / "a")
    assert [record["step"] for record in found] == list(range(1, 13))
    assert {"loss", "tokens", "tokens_per_second", "allocated_bytes", "grad_norm", "learning_rate", "step_seconds"} <= found[0].keys()
    assert all(record["tokens"] == 4 * 2 * 24 for record in found)
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[0]["allocated_bytes"] > 0
    assert all(record["mfu"] is None and record["model_flops_per_second"] > record["tokens_per_second"] for record in found)
    assert all(0 < record["data_seconds"] < record["step_seconds"] for record in found)
    assert all(1 <= record["router_load"]["2"] <= 2 and 0 < record["router_entropy"]["2"] < log(4) for record in found)
    assert all(record["idle_experts"].keys() == {"2"} for record in found)
    assert run(["train", plan, "--data", str(token_file), "--out", str(tmp_path / "b"), "--steps", "2"]) == 0
    assert run(["train", plan, "--data", str(token_file), "--out", str(tmp_path / "c"), "--steps", "2", "--seed", "1"]) == 0
    assert [record["loss"] for record in records(tmp_path / "b")] == [record["loss"] for record in found[:2]]
    assert [record["loss"] for record in records(tmp_path / "c")] != [record["loss"] for record in found[:2]]


def test_held_out_text_is_evaluated_and_changes_nothing(
    tmp_path: Path, token_file: Path, plan_file: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second step and at the end, a separate line; the training losses are bitwise equal to those without it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plan, words = plan_file({}), ("--data", str(token_file), "--seed", "5")
    assert run(["train", plan, *words, "--out", str(tmp_path / "plain")]) == 0
    evaluation = "--eval-data", str(token_file), "--eval-every", "2", "--eval-batches", "2"
    assert run(["train", plan, *words, "--out", str(tmp_path / "held"), *evaluation]) == 0
    found = [line for line in lines(tmp_path / "held") if "evaluation_loss" in line]
    assert [(line["step"], line["evaluation_tokens"]) for line in found] == [(2, 2 * 4 * 2 * 24), (3, 2 * 4 * 2 * 24)]
    assert [line["loss"] for line in records(tmp_path / "held")] == [line["loss"] for line in records(tmp_path / "plain")]
    memory = [line for line in lines(tmp_path / "plain") if "rank_allocated_bytes" in line]
    resident = records(tmp_path / "plain")[1]["allocated_bytes"]
    assert memory == [{"step": 2, "rank_allocated_bytes": [resident], "rank_planned_bytes": None}]
    assert found[1]["evaluation_loss"] < found[0]["evaluation_loss"] < 5.6
    capsys.readouterr()
    error = refused(
        capsys, "train", plan, *words, "--out", str(tmp_path / "more"), "--eval-data", str(token_file), "--eval-batches", "99999"
    )
    assert "MP622" in error
    assert "--eval-batches" in error
    more = "--out", str(tmp_path / "more"), "--validation-fraction", "0.1"
    assert "MP628" in refused(capsys, "train", plan, *words, *more, "--eval-data", str(token_file))
    assert run(["train", plan, *words, *more, "--eval-batches", "1"]) == 0
    (found,) = [line for line in lines(tmp_path / "more") if "evaluation_loss" in line]
    assert (found["step"], found["evaluation_tokens"]) == (3, 4 * 2 * 24)
    assert [line["loss"] for line in records(tmp_path / "more")] != [line["loss"] for line in records(tmp_path / "plain")]


@pytest.mark.slow
def test_two_stages_under_torchrun(
    tmp_path: Path, token_file: Path, plan_file: Any, torchrun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun -m megarun` on the plan's own cut: only rank 0 writes, and the losses are one process's."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run(["train", plan_file({}), "--data", str(token_file), "--out", str(tmp_path / "one")]) == 0
    plan = plan_file({"mesh.pp": 2})
    done = torchrun(2, "-m", "megarun", "train", plan, "--data", str(token_file), "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss, first and last") == 1
    one, two = ([record["loss"] for record in records(tmp_path / name)] for name in ("one", "two"))
    assert one == two


@pytest.mark.slow
@pytest.mark.requirement("R-59")
def test_the_first_failing_rank_speaks(tmp_path: Path, token_file: Path, plan_file: Any, torchrun: Any) -> None:
    """Rank 1 fails and rank 0's connection breaks: one error is read, rank 1's, with its coordinate."""
    (tmp_path / "failing.py").write_text(FAILING)
    plan = plan_file({"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 4}, "training.steps": 10})
    done = torchrun(2, str(tmp_path / "failing.py"), "train", plan, "--data", str(token_file), "--out", str(tmp_path / "out"))
    assert done.returncode != 0
    assert "rank 1 (pp 1) of 2 failed first:" in done.stderr
    assert "OSError: the disk was removed" in done.stderr
    assert done.stderr.count("error[") == 1
    assert "Full Schedule" not in done.stderr


def test_refusals(tmp_path: Path, token_file: Path, plan_file: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Each names the problem, with values, and the fix."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = str(tmp_path / "out")
    tail = ["--data", str(token_file), "--out", out]

    said = refused(capsys, "train", plan_file({"mesh.pp": 2, "mesh.dp_shard": 2}), *tail)
    assert "MP601" in said
    assert "= 2 · 1 · 2 · 1 · 1 = 4, processes started = 1" in said
    assert f"hint: torchrun --standalone --nproc-per-node 4 -m megarun train {tmp_path}/plan.json --data {token_file} --out {out}" in said

    spec = tmp_path / "spec.yaml"
    spec.write_text("format: megaplan.spec/1\nname: small\n")
    assert f"hint: megaplan split {spec} -o plan.json" in refused(capsys, "train", str(spec), *tail)

    assert "nothing.json" in refused(capsys, "train", str(tmp_path / "nothing.json"), *tail)
    plan = plan_file({})
    assert "missing.tokens" in refused(capsys, "train", plan, "--data", str(tmp_path / "missing.tokens"), "--out", out)
    truncated = tmp_path / "truncated.tokens"
    truncated.write_bytes(token_file.read_bytes()[:-100])
    assert "truncated.tokens" in refused(capsys, "train", plan, "--data", str(truncated), "--out", out)

    said = refused(capsys, "train", plan_file({"model.vocab_size": 100}), *tail)
    assert f"vocab_size = {TokenFile(token_file).vocab_size}, model.vocab_size = 100" in said
    long_rows = plan_file({"batch": {"micro_batch_size": 1, "seq_length": 2**26}})
    assert "MP615" in refused(capsys, "train", long_rows, *tail)
    assert "MP790" in refused(capsys, "train", plan_file({"precision.families": {"E": "fp8"}}), *tail)
    assert "MP607" in refused(capsys, "train", plan_file({"training.learning_rate": 1e30, "training.gradient_clip": None}), *tail)
    assert "MP608" in refused(capsys, "train", plan_file({}), *tail)  # the run that was not finite left its metrics
    assert "--data" in refused(capsys, "train", plan)
    assert "greater than or equal to 1" in refused(capsys, "train", plan, *tail, "--steps", "-3")


@pytest.mark.parametrize(("words", "status"), [(["train", "--help"], 0), (["train", "no.json", "--data", "no", "--out", "no"], 2)])
def test_early_answers_need_no_torch(words: list[str], status: int) -> None:
    """Help, and errors of a plan or the data, appear before torch is loaded."""
    code = f"import sys; from megarun.cli.main import run; status = run({words}); sys.exit(99 if 'torch' in sys.modules else status)"
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr


def test_a_usage_error_is_a_document_where_one_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--bogus", "--json"]) == 2
    streams = capsys.readouterr()
    found = json.loads(streams.out)
    assert (found["format"], found["diagnostics"][0]["code"], streams.err) == ("megaplan.error/1", "MP480", "")
