"""The folder of a run: one job at a time, and one folder for all ranks."""

import json
import os
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
from megarun.job.run import Checkpoints
from megarun.launch.process_group import Launch
from megarun.training import agreement
from megarun.training.folder import LOCK, PLAN, Holder, RunFolder, sees

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
            folder.write_plan(text)
            assert (tmp_path / "run" / PLAN).read_text() == text
        (tmp_path / "run" / PLAN).unlink()
        (tmp_path / "run" / PLAN).mkdir()
        (tmp_path / "run" / PLAN / "x").touch()
        with pytest.raises(MegaplanError) as refused:
            folder.write_plan("{}")
        assert refused.value.diagnostics[0].code == "MP608"
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
