"""Checkpoints as a user meets them: saved while training, resumed by the same command, looked at, damaged, refused."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import megarun.checkpoint.save
import megarun.data.batches
import megarun.data.progress
from megaplan.api.load import load
from megaplan.budget.peaks import build_budget
from megaplan.goodput.checkpoints import checkpoint_sizes
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.checkpoint import storage
from megarun.checkpoint.index import read_index
from megarun.checkpoint.manifest import Manifest, list_checkpoints, read_manifest
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.storage import CheckpointWriter
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.progress import START
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.engine.trainer import Trainer

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-69")]
FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]
STEPS = 6


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token file of random words, a token per byte; the same for ever, since a scale of losses depends on them."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(500)]
    (folder / "a.txt").write_text(" ".join(draw.choices(words, k=40_000)))
    tokenize(read_corpus(folder), TokenizerKind.BYTES, 257, folder.parent / "small.tokens")
    return folder.parent / "small.tokens"


@pytest.fixture
def command(tmp_path: Path, token_file: Path, spec_with: Any) -> Callable[..., list[str]]:
    """Words that train the small spec, changed, saving every other step."""

    def words(folder: str, *more: str, **overrides: Any) -> list[str]:
        settings = {"model.vocab_size": 257, "schedule.num_microbatches": 2, "training.steps": STEPS}
        changes = {key.replace("__", "."): value for key, value in overrides.items()}
        plan = tmp_path / "plan.json"
        write_plan(make_plan(Spec.model_validate(spec_with(settings | changes))), plan)
        return ["train", str(plan), "--data", str(token_file), "--out", str(tmp_path / folder), "--save-every", "2", *more]

    return words


def losses(folder: Path) -> dict[int, float]:
    """Losses by step; a step that was trained again has its last one."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "step_seconds" in line}


def stop_in_step(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal while it reads the batch of a 0-based step."""
    read = megarun.data.batches.Batches.at

    def at(self: Any, index: int) -> Any:
        if index == step:
            os.kill(os.getpid(), number)
        return read(self, index)

    monkeypatch.setattr(megarun.data.batches.Batches, "at", at)


def wait_for_the_save_in_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a save in progress end, successfully or not, while that step's batch is read and nothing polls it."""
    read, futures = megarun.data.batches.Batches.at, []
    begun = megarun.checkpoint.save.async_save

    def begin(*arguments: Any, **named: Any) -> Any:
        futures.append(begun(*arguments, **named))
        return futures[-1]

    def at(self: Any, index: int) -> Any:
        if index == step - 1:
            wait(futures)
        return read(self, index)

    monkeypatch.setattr(megarun.checkpoint.save, "async_save", begin)
    monkeypatch.setattr(megarun.data.batches.Batches, "at", at)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_resumes(
    number: int, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No step is lost, and the loss curve is bitwise equal to the uninterrupted one."""
    assert run(command("whole")) == 0
    with monkeypatch.context() as patch:
        stop_in_step(2, number, patch)
        assert run(command("stopped")) == 128 + number
    assert "stopped after step 3 and saved; run the same command to resume" in capfd.readouterr().err
    assert max(losses(tmp_path / "stopped")) == 3
    assert run(command("stopped")) == 0
    assert "resumed from" in capfd.readouterr().err
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_the_scale_of_losses_in_fp16_resumes(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale doubles after four good steps here: a resume that lost the count of three would double it in another step."""
    monkeypatch.setattr(megarun.data.progress, "GROWTH_STEPS", 4)
    assert run(command("whole", precision__params="fp16")) == 0
    with monkeypatch.context() as patch:
        stop_in_step(2, signal.SIGTERM, patch)
        assert run(command("stopped", precision__params="fp16")) == 128 + signal.SIGTERM
    saved = read_manifest(list_checkpoints(tmp_path / "stopped")[0])
    assert (saved.step, saved.data_progress.num_scaled) == (3, 3)
    assert run(command("stopped", precision__params="fp16")) == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    whole, stopped = (read_manifest(list_checkpoints(tmp_path / folder)[0]) for folder in ("whole", "stopped"))
    assert whole.step == stopped.step == STEPS
    assert whole.data_progress == stopped.data_progress
    assert (whole.data_progress.loss_scale, whole.data_progress.num_scaled) == (2 * START.loss_scale, 2)


def damage_bits(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "a flipped bit": ("__0_0.distcp", damage_bits, "SHA-256"),
    "a truncated file": ("__0_0.distcp", truncate, "in the manifest"),
    "a deleted file": ("__0_0.distcp", Path.unlink, "No such file or directory"),
    "a changed index": ("index.json", damage_bits, "index.json: SHA-256"),
    "a broken manifest": ("manifest.json", truncate, "JSONDecodeError"),
    "a foreign manifest": ("manifest.json", lambda path: path.write_text('{"format": "megaplan.checkpoint/1"}'), "KeyError"),
    "a newer format": ("manifest.json", lambda path: path.write_text('{"format": "megaplan.checkpoint/4"}'), "this megarun reads"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_said_and_the_one_before_is_used(what: str, tmp_path: Path, command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    name, action, message = DAMAGES[what]
    assert run(command("run", "--steps", "4")) == 0
    newest = list_checkpoints(tmp_path / "run")[0]
    action(newest / name)
    assert run(["checkpoint", "verify", str(tmp_path / "run")]) == 1
    assert message in capfd.readouterr().err
    assert run(command("other", "--resume", str(newest))) == 2
    assert message in capfd.readouterr().err
    assert run(command("run", "--steps", "5")) == 0
    said = capfd.readouterr().err
    assert "warning[MP646]" in said
    assert message in said
    assert "step-00000002, 2 steps done" in said


def test_a_save_that_was_killed_is_not_a_checkpoint(tmp_path: Path, command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The leftover files are not listed and not read, and the next save of that step replaces them."""
    assert run(command("run", "--steps", "2")) == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    partial = checkpoints / ".step-00000004.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert run(command("run", "--steps", "4")) == 0
    assert "2 steps done" in capfd.readouterr().err
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


def test_the_folder_of_a_killed_save_is_emptied_and_stays(tmp_path: Path) -> None:
    """The other ranks make it at the same time: their `mkdir` fails if it is removed between its two looks at the folder."""
    manifest = Manifest(step=4, seed=0, global_batch=(1, 1), model_digest="", plan_digest="", world_size=2, torch="", files={})
    writer = CheckpointWriter(tmp_path, manifest, "{}", Retention(2))
    partial = tmp_path / "checkpoints" / ".step-00000004.partial"
    (partial / "left").mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(b"half")
    folder = partial.stat().st_ino
    writer.set_up_storage_writer(is_coordinator=True)
    assert [*partial.iterdir()] == []
    assert partial.stat().st_ino == folder


def test_the_newest_are_kept(tmp_path: Path, command: Any) -> None:
    assert run(command("run", "--keep", "2")) == 0
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000006", "step-00000004"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_with_one_error_and_keeps_the_last_good_one(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The data file of the second save lands on a device that is always full."""
    real = storage.open_own

    def opened(path: Path, flags: int) -> Any:
        return Path("/dev/full").open("wb") if "step-00000004" in str(path) else real(path, flags)

    monkeypatch.setattr(storage, "open_own", opened)
    wait_for_the_save_in_step(5, monkeypatch)
    assert run(command("run")) == 2
    assert max(losses(tmp_path / "run")) == 5, "noticed after the step in which the save has failed, not at the next save"
    said = capfd.readouterr().err
    assert "error[MP645]" in said
    assert "No space left on device" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_rank_that_has_ended_is_not_a_failure_of_the_save(
    command: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other ranks' saves end with a closed connection, which the job reports as the end of that rank."""

    def finish(*_: Any, **__: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:28347")

    monkeypatch.setattr(CheckpointWriter, "finish", finish)
    assert run(command("run")) == 2
    said = capfd.readouterr().err
    assert "Connection closed by peer" in said
    assert "MP645" not in said


def test_an_error_does_not_cost_the_save_in_progress(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, measure, steps = CheckpointWriter.finish, Trainer.measure, [0]

    def slow(*words: Any, **named: Any) -> None:
        time.sleep(0.5)
        finish(*words, **named)

    def failing(self: Trainer, batch: Any) -> Any:
        steps[0] += 1
        if steps[0] == 3:  # the save after step 2 is in progress
            raise RuntimeError("a device fails")
        return measure(self, batch)

    monkeypatch.setattr(CheckpointWriter, "finish", slow)
    monkeypatch.setattr(Trainer, "measure", failing)
    assert run(command("run")) == 2
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002"]


@pytest.mark.requirement("R-54")
def test_list_inspect_and_export(tmp_path: Path, command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command("run", "--steps", "4")) == 0
    folder, out = str(tmp_path / "run"), tmp_path / "weights.safetensors"
    capfd.readouterr()
    assert run(["checkpoint", "list", folder, "--json"]) == 0
    assert [each["step"] for each in json.loads(capfd.readouterr().out)["checkpoints"]] == [4, 2]
    assert run(["checkpoint", "inspect", folder, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["manifest"]["step"] == 4
    digests = json.loads((tmp_path / "plan.json").read_text())["digests"]
    assert (document["manifest"]["model_digest"], document["manifest"]["plan_digest"]) == (digests["model"], digests["plan"])
    assert run(["checkpoint", "export", folder, "-o", str(out)]) == 0
    exported = load_file(out)
    shapes = {each["name"]: each["shape"] for each in document["tensors"] if each["name"].split(".")[0] not in ("optimizer", "generator")}
    assert {name: list(tensor.shape) for name, tensor in exported.items()} == shapes
    assert run(["checkpoint", "export", folder, "-o", str(out)]) == 2
    assert "MP608" in capfd.readouterr().err
    assert run(["checkpoint", "list", str(tmp_path / "nothing")]) == 2
    assert "MP649" in capfd.readouterr().err


def test_never_resuming_refuses_a_run_that_is_there(tmp_path: Path, command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command("run", "--steps", "2")) == 0
    assert run(command("run", "--resume", "never")) == 2
    assert "MP608" in capfd.readouterr().err


@pytest.mark.slow
def test_torchrun_is_stopped_and_resumed_under_another_plan(tmp_path: Path, command: Any) -> None:
    """SIGTERM to the launcher of pp 2 while it trains; both ranks save the same step, and one process continues from it."""
    assert run(command("whole", training__steps=40, training__learning_rate=1.0e-4)) == 0
    words = command("moved", mesh={"pp": 2}, training__steps=40, training__learning_rate=1.0e-4)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megarun", *words]
    process = subprocess.Popen(launcher, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "moved" / "metrics.jsonl"
    end = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode != 0, said
    stopped = max(losses(tmp_path / "moved"))
    assert stopped < 40
    assert list_checkpoints(tmp_path / "moved")[0].name == f"step-{stopped:08d}", said
    assert run(command("moved", training__steps=40, training__learning_rate=1.0e-4)) == 0
    expected = losses(tmp_path / "whole")
    found = losses(tmp_path / "moved")
    assert found.keys() == expected.keys()
    assert all(found[step] == pytest.approx(loss, rel=1e-4) for step, loss in expected.items())


KILLED = """
import os, signal
import megarun.data.batches as batches
real = batches.Batches.at
def at(self, step):
    if step == int(os.environ["KILLED_STEP"]) and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, step)
batches.Batches.at = at
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_torchrun_restarts_a_job_that_lost_a_rank(step: int, tmp_path: Path, command: Any) -> None:
    """kill -9 of a rank, before the first save or after it: torchrun restarts all ranks, and they continue from the checkpoint."""
    assert run(command("whole")) == 0
    words = command("killed", mesh={"pp": 2})
    (tmp_path / "program.py").write_text(KILLED)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    extra = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "KILLED_STEP": str(step)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "program.py"), *words],
        env={**os.environ, **extra},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert ("2 steps done" in done.stderr) == (step > 2)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.jobs
def test_a_rank_that_never_starts_is_named(tmp_path: Path, command: Any) -> None:
    """Rank 0 of two waits three seconds, not minutes."""
    words = command("alone", "--start-timeout", "3", mesh={"pp": 2})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    environment = {**os.environ, **place, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "megarun", *words], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "error[MP650]" in done.stderr
    assert "1 of 2 processes did not start within 3 s: rank 1 (pp 1)" in done.stderr


@pytest.mark.parametrize("matrix", ["adamw", "muon"])
def test_a_checkpoint_has_the_bytes_that_were_planned(matrix: str, tmp_path: Path, command: Any) -> None:
    """All except torch's generators, which are not part of a plan."""
    assert run(command("run", "--steps", "2", optimizer__matrix=matrix)) == 0
    index = read_index(list_checkpoints(tmp_path / "run")[0])
    item = {"torch.float32": 4, "torch.bfloat16": 2, "torch.int64": 8}
    saved = sum(prod(tensor.shape) * item[tensor.dtype] for name, tensor in index.items() if not name.startswith("generator"))
    job = load(tmp_path / "plan.json")
    assert saved == checkpoint_sizes(job.spec, job.inventory, job.layout, build_budget(job.spec, job.inventory, job.layout)).whole_bytes
