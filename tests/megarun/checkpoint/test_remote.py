"""Checkpoints in a storage that fsspec reaches: nothing is renamed there, and an operation may fail and be tried again.

tests/storage has the same against an S3 server; here the storage is memory or a folder behind `file://`.
"""

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

import megarun.remote
from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.checkpoint.index import INDEX
from megarun.checkpoint.leftovers import tidy
from megarun.checkpoint.manifest import FOLDER, MANIFEST, PLAN, Manifest, finished, folder_name, list_checkpoints
from megarun.checkpoint.remote import OWNER, Owner
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.sums import FileRecord, record_of
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.remote import RemotePath, StorageError, any_path

pytestmark = pytest.mark.runtime
DATA = "__0_0.distcp"
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "storage",
    "model": {"pattern": "D", "num_layers": 1, "hidden_size": 32, "vocab_size": 257, "mlp": {"ffn_hidden_size": 40}},
    "batch": {"micro_batch_size": 2, "seq_length": 24},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    "training": {"steps": 6, "learning_rate": 3.0e-3},
}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megarun.remote, "FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> RemotePath:
    """A new place in memory."""
    return RemotePath(f"memory://{request.node.name.split('[')[0]}-{id(request)}")


@pytest.fixture
def command(tmp_path: Path, storage: RemotePath) -> Callable[..., list[str]]:
    """Words that train a very small model, saving every other step into the storage."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text(Path(__file__).read_text())
    tokenize(read_corpus(text), TokenizerKind.BYTES, 257, tmp_path / "small.tokens")
    plan = tmp_path / "plan.json"
    write_plan(make_plan(Spec.model_validate(SPEC)), plan)

    def words(folder: str, *more: str, url: str = str(storage)) -> list[str]:
        data = ["--data", str(tmp_path / "small.tokens"), "--out", str(tmp_path / folder)]
        return ["train", str(plan), *data, "--save-every", "2", *(["--checkpoint-url", url] if url else []), *more]

    return words


def written(root: RemotePath, step: int, number: int = 0, manifest: bool = True) -> RemotePath:
    """A save of one tensor."""
    path = root / FOLDER / folder_name(step, number)
    texts = {DATA: b"\0" * 64, PLAN: b"{}"}
    texts[INDEX] = json.dumps({"tensors": {"a": {"dtype": "torch.float32", "shape": [16], "chunks": [[[0], [16], DATA, 0, 64]]}}}).encode()
    for name, data in texts.items():
        (path / name).write_bytes(data)
    files: dict[str, FileRecord] = {name: record_of(path / name) for name in texts}
    if manifest:
        (path / MANIFEST).write_bytes(Manifest(step, 0, (4, 16), "sha256:a", "sha256:b", 1, "2.13.0", files).text().encode())
    return path


def losses(folder: Path) -> dict[int, float]:
    """Losses by step; a step that was trained again has its last one."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "step_seconds" in line}


def names(root: RemotePath) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


def test_a_run_resumes_from_a_storage_as_from_a_folder(
    tmp_path: Path, storage: RemotePath, command: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Losses are bitwise equal, also where only the storage is left of the first machine; older checkpoints go, the stage is empty."""
    assert run(command("local", url="")) == 0
    assert run(command("first", "--steps", "4")) == 0
    assert names(storage) == ["step-00000004", "step-00000002"]
    assert run(command("second")) == 0
    assert f"resumed from {storage}/checkpoints/step-00000004, 4 steps done" in capfd.readouterr().err
    assert losses(tmp_path / "first") | losses(tmp_path / "second") == losses(tmp_path / "local")
    assert names(storage) == ["step-00000006", "step-00000004"]
    assert not [path for path in (tmp_path / "second" / "upload").rglob("*") if path.is_file()]
    assert run(["checkpoint", "verify", str(storage)]) == 0
    exported = [tmp_path / f"{name}.safetensors" for name in ("remote", "local")]
    for folder, out in zip((storage, tmp_path / "local"), exported, strict=True):
        assert run(["checkpoint", "export", str(folder), "-o", str(out)]) == 0
    remote, local = map(load_file, exported)
    assert remote.keys() == local.keys()
    assert all(torch.equal(remote[name], local[name]) for name in local)
    capfd.readouterr()
    assert run(command("third", "--resume", "never")) == 2
    assert "MP608" in capfd.readouterr().err
    # a step saved a second time has its own folder, and the first one goes when the manifest of the second is there
    older = f"{storage}/checkpoints/step-00000004"
    assert run(command("fourth", "--resume", older)) == 0
    assert names(storage)[0] == "step-00000006.1"
    assert not (storage / FOLDER / "step-00000006").exists()
    assert losses(tmp_path / "fourth")[6] == losses(tmp_path / "local")[6]


def test_a_save_without_a_manifest_is_none(storage: RemotePath) -> None:
    """Files that a kill leaves in an upload are not listed, do not hide an earlier save of the step, and are removed at the next start."""
    kept = written(storage, 4)
    left = [written(storage, 4, 1, manifest=False), written(storage, 6, manifest=False)]
    last = written(storage, 2, 10)
    superseded = written(storage, 2, 9)
    assert [each.path for each in finished(storage)] == [last, kept]
    tidy(storage)
    assert not any(path.exists() for path in (*left, superseded))
    assert [each.path for each in finished(storage)] == [last, kept]


def test_a_damaged_object_counts_for_nothing(storage: RemotePath) -> None:
    paths = [written(storage, step) for step in (2, 4, 6)]
    (paths[1] / DATA).write_bytes(b"\0" * 63)
    new = written(storage, 8)
    manifest = Manifest(8, 0, (4, 16), "sha256:a", "sha256:b", 1, "2.13.0", {})
    assert Retention(2).outdated(storage, new, manifest) == [paths[1], paths[0]]
    assert run(["checkpoint", "verify", str(paths[1])]) == 1


def fail(monkeypatch: pytest.MonkeyPatch, method: str, times: int, matching: str) -> list[str]:
    """Let operations on matching paths fail some times as an overloaded server does; returns the paths that failed."""
    failed: list[str] = []
    works = getattr(MemoryFileSystem, method)

    def fails(self: Any, *arguments: Any, **named: Any) -> Any:
        path = str(arguments[-1] if method == "put_file" else arguments[0])
        if matching in path and len(failed) < times:
            failed.append(path)
            raise OSError(errno.EIO, "503 Slow Down")
        return works(self, *arguments, **named)

    monkeypatch.setattr(MemoryFileSystem, method, fails)
    return failed


def test_an_upload_is_tried_again_and_then_given_up(
    tmp_path: Path, storage: RemotePath, command: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost below the limit of attempts; above it the run ends, and the next run continues from a complete checkpoint."""
    with monkeypatch.context() as patch:
        failed = fail(patch, "put_file", megarun.remote.ATTEMPTS - 1, "step-00000002")
        assert run(command("run", "--steps", "2")) == 0
    assert len(failed) == megarun.remote.ATTEMPTS - 1
    assert names(storage) == ["step-00000002"]
    with monkeypatch.context() as patch:
        fail(patch, "pipe_file", 99, f"step-00000004/{MANIFEST}")  # everything except the commit
        assert run(command("run", "--steps", "4")) == 2
    said = capfd.readouterr().err
    assert "MP645" in said
    assert "not written in 5 attempts: OSError: [Errno 5] 503 Slow Down" in said
    assert names(storage) == ["step-00000002"]
    assert run(command("run")) == 0
    assert "2 steps done" in capfd.readouterr().err
    assert run(command("local", url="")) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "local")
    with monkeypatch.context() as patch:  # an outage at the start is not an empty storage, nor a damaged checkpoint
        fail(patch, "cat_file", 99, MANIFEST)
        assert run(command("elsewhere")) == 2
    said = capfd.readouterr().err
    assert "error[MP666]" in said
    assert "MP646" not in said
    assert not (tmp_path / "elsewhere" / "metrics.jsonl").exists()


def test_the_later_of_two_jobs_has_the_storage(storage: RemotePath) -> None:
    first, second = Owner(storage), Owner(storage)
    first.claim()
    first.require()
    second.claim()
    second.require()
    with pytest.raises(MegaplanError, match=r"(?s)MP658.*process \d+ on"):
        first.require()
    (storage / FOLDER / OWNER).write_bytes(b"{")
    with pytest.raises(MegaplanError, match="MP658"):
        second.require()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checkpoint-url", "nothing://bucket/run"], "Protocol not known: nothing"),
        (["--checkpoint-url", "s3://key:secret@bucket/run"], "s3://…@bucket/run: a URL must not contain credentials"),
        (["--checkpoint-url", "/shared/run"], "not a URL"),
        (["--checkpoint-url", "s3://"], "names no bucket"),
        (["--out", "s3://bucket/run"], "--out s3://bucket/run: metrics and lock need a local folder"),
    ],
)
def test_a_url_that_cannot_be_used(words: list[str], said: str, command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*command("run", url=""), *words]) == 2
    shown = capfd.readouterr().err
    assert "error[MP665]" in shown
    assert said in shown
    assert "secret" not in shown


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(MegaplanError, match=r"(?s)MP665.*Install s3fs"):
        any_path("s3://bucket/run")


def test_a_refused_access_is_not_tried_again(storage: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refused(self: Any, path: str, *_: Any, **__: Any) -> Any:
        calls.append(path)
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refused)
    with pytest.raises(StorageError, match="not read: PermissionError: Access Denied") as error:
        (storage / "a").read_bytes(9)
    assert len(calls) == 1
    assert pickle.loads(pickle.dumps(error.value)).diagnostics == error.value.diagnostics


def test_a_bucket_that_does_not_exist_is_not_a_missing_file(storage: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Any, path: str, *_: Any, **__: Any) -> Any:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", missing)
    with pytest.raises(StorageError, match="not written: FileNotFoundError: The specified bucket does not exist"):
        Owner(storage).claim()


def test_a_local_folder_behind_a_url(tmp_path: Path) -> None:
    """`file://` is written as an object store is."""
    root = any_path(f"file://{tmp_path}/run")
    assert isinstance(root, RemotePath)
    assert finished(root) == []
    path = written(root, 2)
    assert [each.path for each in finished(root)] == [path]
    assert [each.path.name for each in finished(tmp_path / "run")] == ["step-00000002"]
    source = tmp_path / "a"
    source.write_bytes(b"1234")
    (path / "b" / "c").upload(source)
    assert ((path / "b" / "c").size(), (path / "b" / "c").read_bytes(2)) == (4, b"123")
    with pytest.raises(FileNotFoundError):
        (path / "d").size()


def test_a_local_file_has_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill during the write leaves the previous file."""
    target = any_path(f"file://{tmp_path}/owner.json")
    assert isinstance(target, RemotePath)
    target.write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    for write in (lambda: target.write_bytes(b"new"), lambda: target.upload(tmp_path / "new")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                write()
        assert (tmp_path / "owner.json").read_bytes() == b"old"
    target.upload(tmp_path / "new")
    assert (tmp_path / "owner.json").read_bytes() == b"new"
    assert not (tmp_path / "owner.json.partial").exists()
