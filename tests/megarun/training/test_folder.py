"""The folder of a run: one job at a time, and one folder for all ranks."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megaplan.errors import MegaplanError
from megaplan.spec.models import Mesh
from megarun.files import read_bounded
from megarun.job.run import Checkpoints
from megarun.launch.process_group import Launch
from megarun.training import agreement
from megarun.training.folder import JOB, LOCK, PLAN, Holder, RunFolder, sees
from megarun.training.prepare import out_folder

pytestmark = pytest.mark.runtime


def lock(folder: Path, **changes: Any) -> None:
    """A lock of another process."""
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps(json.loads(Holder.this_process().text()) | changes))


def test_a_second_job_is_refused(tmp_path: Path) -> None:
    """The message names host and process; and the folder is free again at the end."""
    with RunFolder(tmp_path / "run"):
        with pytest.raises(MegaplanError) as refused, RunFolder(tmp_path / "run"):
            pass
        (found,) = refused.value.diagnostics
        assert found.code == "MP658"
        assert f"process {os.getpid()} on {socket.gethostname()} uses the folder" in found.detail
        assert (tmp_path / "run" / LOCK).exists(), "the refused job leaves the lock"
    assert list((tmp_path / "run").iterdir()) == []


def test_the_plan_is_kept_and_replaced(tmp_path: Path) -> None:
    """Whole, without a leftover; a folder that cannot be written is named."""
    with RunFolder(tmp_path / "run") as folder:
        for text in ("{}", '{"other": 1}'):
            folder.keep(PLAN, text)
            assert (tmp_path / "run" / PLAN).read_text() == text
        (tmp_path / "run" / PLAN).unlink()
        (tmp_path / "run" / PLAN).mkdir()
        (tmp_path / "run" / PLAN / "x").touch()
        with pytest.raises(MegaplanError) as refused:
            folder.keep(PLAN, "{}")
        assert refused.value.diagnostics[0].code == "MP670"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [PLAN]


def test_the_lock_of_a_process_that_has_ended_is_taken_over(tmp_path: Path) -> None:
    """A process id that was never there, one that is used again, and one that has ended but was not waited for."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for changes in ({"pid": 2**22 + 1}, {"started": 1}, {"pid": ended.pid}):
        lock(tmp_path, **changes)
        with RunFolder(tmp_path) as folder:
            assert sees(tmp_path, folder.holder.token, 0) == ""
    ended.wait()


def test_a_lock_of_another_machine_is_taken_over_when_no_process_touches_it(tmp_path: Path) -> None:
    elsewhere = {"host": "node7", "namespace": "another boot"}
    lock(tmp_path, **elsewhere)
    os.utime(tmp_path / LOCK, (time.time() - 3600, time.time() - 3600))
    with RunFolder(tmp_path) as folder:
        assert sees(tmp_path, folder.holder.token, 0) == ""
    lock(tmp_path, **elsewhere)
    over = threading.Event()

    def touch() -> None:
        while not over.wait(0.2):
            os.utime(tmp_path / LOCK)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with pytest.raises(MegaplanError, match=f"process {os.getpid()} on node7 uses the folder"), RunFolder(tmp_path):
            pass
    finally:
        over.set()
        toucher.join()


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"host": 1}', "\0"])
def test_a_lock_that_cannot_be_read_counts_by_its_age(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(text)
    os.utime(tmp_path / LOCK, (time.time() - 3600, time.time() - 3600))
    with RunFolder(tmp_path) as folder:
        assert sees(tmp_path, folder.holder.token, 0) == ""


def test_a_job_that_lost_its_folder_does_not_save(tmp_path: Path) -> None:
    with RunFolder(tmp_path, heartbeat_seconds=0.01) as folder:
        folder.require()
        lock(tmp_path, host="node7", namespace="another boot")
        while not folder._lost:
            time.sleep(0.01)
        with pytest.raises(MegaplanError, match="on node7 uses the folder"):
            folder.require()
    assert (tmp_path / LOCK).exists(), "not this job's to remove"


def accounts(*folders: Path, url: str = "") -> list[str | None]:
    """Error of each rank; ranks are threads, rank 0 has the lock in the first folder."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def compare(rank: int, token: str) -> str | None:
        job = SimpleNamespace(spec=SimpleNamespace(mesh=Mesh(pp=len(folders))))
        run: Any = SimpleNamespace(out=folders[rank], job=job, checkpoints=Checkpoints(url=url))
        try:
            agreement.require_one_folder(run, Launch(rank, len(folders), rank, store, 20), token)
        except MegaplanError as error:
            return f"{error.diagnostics[0].code}: {error.diagnostics[0].detail}"
        return None

    with RunFolder(folders[0]) as folder, ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(lambda rank: compare(rank, folder.holder.token if rank == 0 else ""), range(len(folders))))


def test_a_rank_with_another_folder_is_named_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error covers a run whose folder another job uses; before, every save of such a run lacked a rank's part."""
    monkeypatch.setattr(agreement, "SEE_SECONDS", 0.1)
    assert accounts(tmp_path / "a", tmp_path / "a", tmp_path / "a") == [None] * 3
    assert accounts(tmp_path / "a", tmp_path / "d", url="s3://bucket/run") == [None] * 2, "a storage has the checkpoints of all nodes"
    lock(tmp_path / "b", host="node7")
    found = accounts(tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert len(set(found)) == 1
    host = socket.gethostname()
    assert found[0] is not None
    assert found[0].splitlines() == [
        f"MP659: rank 2 (pp 2) on {host}:",
        f"  {tmp_path}/b/{LOCK}: held by process {os.getpid()} on node7, not by rank 0 of this job",
        f"rank 3 (pp 3) on {host}:",
        f"  {tmp_path}/c/{LOCK}: no such file",
    ]


def test_a_lock_that_is_out_of_sight_is_doubted(tmp_path: Path) -> None:
    """A network file system that shows no file, or answers with an error, has not given the folder to another job."""
    with RunFolder(tmp_path, stale_seconds=30, heartbeat_seconds=0.01) as folder:
        for hide in (lambda: (tmp_path / LOCK).rename(tmp_path / "away"), lambda: (tmp_path / LOCK).write_text("")):
            text = (tmp_path / LOCK).read_text()
            hide()
            time.sleep(0.1)
            folder.require()
            (tmp_path / LOCK).write_text(text)
        assert folder._thread.is_alive()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_read_that_fails_is_tried_again(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat, the start that finds a lock, and the other ranks try again."""
    real, left = read_bounded, [3]

    def read(path: Path, max_bytes: int) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real(path, max_bytes)

    with RunFolder(tmp_path, heartbeat_seconds=0.01) as folder:
        monkeypatch.setattr("megarun.training.folder.read_bounded", read)
        monkeypatch.setattr("megarun.training.folder.POLL_SECONDS", 0.01)
        time.sleep(0.1)
        assert left[0] < 0
        folder.require()
        left[0] = 3
        assert sees(tmp_path, folder.holder.token, 1) == ""
        left[0] = 3
        with pytest.raises(MegaplanError, match=f"process {os.getpid()} on"), RunFolder(tmp_path):
            pass
    lock(tmp_path, started=1)
    left[0] = 3
    with RunFolder(tmp_path):
        pass


def test_a_lock_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Unless another job has left its own record: it ran here while this one was stopped."""
    with RunFolder(tmp_path, stale_seconds=0.05, heartbeat_seconds=0.01) as folder:
        folder.keep(JOB, json.dumps({"token": folder.holder.token}))
        (tmp_path / LOCK).unlink()
        assert sees(tmp_path, folder.holder.token, 10) == "", "the lock exists before its text is in it"
        (tmp_path / JOB).write_text(json.dumps({"token": "another"}))
        (tmp_path / LOCK).unlink()
        time.sleep(0.2)
        assert not (tmp_path / LOCK).exists()


def test_a_lock_of_the_future_is_waited_for_no_longer_than_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock was ahead when its job touched it; and the wait is announced."""
    lock(tmp_path, host="node7", namespace="another boot")
    os.utime(tmp_path / LOCK, (time.time() + 3600, time.time() + 3600))
    with RunFolder(tmp_path, stale_seconds=0.5) as folder:
        assert sees(tmp_path, folder.holder.token, 0) == ""
    assert f"process {os.getpid()} on node7 touched it" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["removed", "renamed", "replaced"])
def test_a_folder_that_is_missing_is_a_failed_save(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written into a new folder of the name."""
    monkeypatch.setattr("megarun.training.folder.DOUBT_SECONDS", 0.0)
    out = tmp_path / "out"
    with RunFolder(out, heartbeat_seconds=30) as folder:
        if what == "removed":
            shutil.rmtree(out)
        else:
            out.rename(tmp_path / "new")
        if what == "replaced":
            out.mkdir()
        with pytest.raises(MegaplanError) as refused:
            folder.require()
    (found,) = refused.value.diagnostics
    assert found.code == "MP645"
    assert ("another folder has its name" if what == "replaced" else "removed or renamed") in found.detail
    assert "the run's folder was removed" in found.detail if what == "removed" else f"folder is {tmp_path}/new" in found.detail
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize("name", [LOCK, PLAN, JOB, "tokenizer.json", "metrics.jsonl", "checkpoints", "tensorboard", "wandb", "upload"])
def test_no_link_in_the_folder_is_followed(name: str, tmp_path: Path) -> None:
    """The folder itself may be one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    (tmp_path / "real" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MegaplanError, match="MP671"), RunFolder(tmp_path / "out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]
    (tmp_path / "real" / name).unlink()
    with RunFolder(tmp_path / "out") as folder:
        folder.require()


def test_what_is_wrong_with_a_path_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path / "file", f"{tmp_path}/file is a file"),
        (tmp_path / "file" / "out", f"{tmp_path}/file is a file"),
        (tmp_path / ("x" * 300), "File name too long: at most 255 bytes a name"),
    ):
        with pytest.raises(MegaplanError) as refused, RunFolder(path):
            pass
        assert refused.value.diagnostics[0].code == "MP670"
        assert reason in refused.value.diagnostics[0].detail
    with pytest.raises(MegaplanError, match="MP670"):
        out_folder("")
