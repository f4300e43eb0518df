"""A restart by torchrun trains what the job began with; a new start of the command reads its files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.engine.trainer import Trainer
from megarun.training.folder import JOB, PLAN

pytestmark = pytest.mark.runtime
STEPS = 6


@pytest.fixture
def words(tmp_path: Path, spec_with: Any) -> Callable[..., list[str]]:
    """Write plan and tokens, and give the words that train them."""
    (tmp_path / "text").mkdir()

    def make(rate: float = 3e-3, text: str = "") -> list[str]:
        (tmp_path / "text" / "a.txt").write_text(text or Path(__file__).read_text())
        tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tmp_path / "small.tokens")
        changes = {"model.pattern": "AD", "model.num_layers": 2, "model.vocab_size": 257, "training.learning_rate": rate}
        values = spec_with({**changes, "training.steps": STEPS})
        for section in ("mamba", "moe", "recurrent"):
            del values["model"][section]
        write_plan(make_plan(Spec.model_validate(values)), tmp_path / "plan.json")
        return ["train", str(tmp_path / "plan.json"), "--data", str(tmp_path / "small.tokens"), "--save-every", "2"]

    return make


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the update after so many steps fail, once."""

    def aim(step: int) -> None:
        real = Trainer.update

        def update(self: Trainer, number: int) -> None:
            if number == step:
                monkeypatch.setattr(Trainer, "update", real)
                raise RuntimeError("broken on purpose")
            real(self, number)

        monkeypatch.setattr(Trainer, "update", update)

    return aim


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Look like a process that torchrun has started as often before."""

    def start(restarts: int, run_id: str = "0f3c") -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))

    return start


def losses(out: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {each["step"]: each["loss"] for each in records if "grad_norm" in each}


def test_a_plan_that_changes_meanwhile_is_not_trained(
    words: Any, fails_once: Any, launched: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*words(), "--out", str(tmp_path / "whole")]) == 0
    out = tmp_path / "run"
    launched(0)
    fails_once(4)
    assert run([*words(), "--out", str(out)]) == 2
    changed = words(rate=0.3)
    launched(1)
    assert run([*changed, "--out", str(out)]) == 0
    said = capfd.readouterr().err
    assert f"warning[MP674]: {(said.split('MP674]: ')[1]).splitlines()[0]}" in said
    assert "plan.json has changed since the job began" in said
    assert losses(out) == losses(tmp_path / "whole")
    assert float(json.loads((out / PLAN).read_text())["inputs"]["training"]["learning_rate"]) == 3e-3


def test_a_plan_that_is_missing_is_not_needed(
    words: Any, fails_once: Any, launched: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And an option that the script has changed meanwhile is that of the start."""
    out, given = tmp_path / "run", words()
    launched(0)
    fails_once(4)
    assert run([*given, "--out", str(out), "--steps", "5"]) == 2
    (tmp_path / "plan.json").unlink()
    launched(1)
    assert run([*given, "--out", str(out), "--steps", "3"]) == 0
    said = capfd.readouterr().err
    assert "cannot be read any more" in said
    assert "--steps = 3, the job began with 5" in said
    assert max(losses(out)) == 5


def test_a_restart_continues_from_its_own_checkpoint(
    words: Any, fails_once: Any, launched: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not from the one that the job was to begin with: `--weights-only` would begin again at step 0."""
    first = [*words(), "--out", str(tmp_path / "first")]
    assert run([*first, "--steps", "2"]) == 0
    out, more = tmp_path / "run", ["--resume", str(tmp_path / "first" / "checkpoints" / "step-00000002"), "--weights-only"]
    launched(0)
    fails_once(4)
    assert run([*words(), "--out", str(out), *more]) == 2
    assert "parameters of" in capfd.readouterr().err
    launched(1)
    assert run([*words(), "--out", str(out), *more]) == 0
    assert f"resumed from {out}/checkpoints/step-0000000" in capfd.readouterr().err


def test_other_tokens_end_a_restart(words: Any, fails_once: Any, launched: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Other tokens by their header; other bytes under the same header by their sum."""
    out, given = tmp_path / "run", words()
    launched(0)
    fails_once(0)
    assert run([*given, "--out", str(out)]) == 2
    data = bytearray((tmp_path / "small.tokens").read_bytes())
    data[-100] ^= 1
    (tmp_path / "small.tokens").write_bytes(data)
    launched(1)
    capfd.readouterr()
    assert run([*given, "--out", str(out)]) == 2
    assert "error[MP614]" in capfd.readouterr().err
    words(text="other text " * 100)
    assert run([*given, "--out", str(out)]) == 2
    assert "error[MP674]" in capfd.readouterr().err


def test_a_new_start_of_the_command_reads_its_files(
    words: Any, fails_once: Any, launched: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job of the same --rdzv-id that another torchrun started before does not count."""
    out = tmp_path / "run"
    launched(0)
    fails_once(4)
    assert run([*words(), "--out", str(out)]) == 2
    document = json.loads((out / JOB).read_text())
    document["launcher"]["agent"]["pid"] = os.getpid()
    (out / JOB).write_text(json.dumps(document))
    assert run([*words(rate=0.3), "--out", str(out)]) == 0
    assert "MP674" not in capfd.readouterr().err
    assert float(json.loads((out / PLAN).read_text())["inputs"]["training"]["learning_rate"]) == 0.3
