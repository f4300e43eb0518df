"""A stuck rank is named with its step, place and operation, and ends the job; ranks here are threads or small processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import megarun.launch.failure
import megarun.launch.process
import megarun.launch.watch
from megaplan.spec.models import Mesh
from megarun.launch.interrupt import Interrupt
from megarun.launch.process import ProcessIdentity
from megarun.launch.process_group import Launch
from megarun.launch.progress import Progress, Timeouts, described
from megarun.launch.watch import BEAT_SECONDS, SILENT_SECONDS, STOP_SECONDS, Beat, Seen, Watch, stuck_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
ME = ProcessIdentity.own()


def seen(count: int, *, step: int = 7, waits: bool = True, silent: float = 0.5, seconds: float = 1.0) -> Seen:
    return Seen(Beat(3, step, "computing", count, seconds, 60.0, "x.py:1 f", waits, ME), silent)


STUCK: dict[str, tuple[dict[int, Seen], list[int]]] = {
    "a stopped process, whatever it did last": ({0: seen(9, waits=False), 1: seen(9, silent=61), 2: seen(8)}, [1]),
    "one that computes while others wait": ({0: seen(9), 1: seen(9, waits=False), 2: seen(9)}, [1]),
    "of several that compute the one behind": ({0: seen(9, waits=False), 1: seen(8, waits=False), 2: seen(7)}, [1]),
    "an earlier step is behind": ({0: seen(9, waits=False), 1: seen(12, step=6, waits=False)}, [1]),
    "all wait: the one behind": ({0: seen(9), 1: seen(9), 2: seen(7)}, [2]),
    "all wait in one place": ({0: seen(9), 1: seen(9)}, [0, 1]),
}


@pytest.mark.parametrize("what", STUCK)
def test_who_is_stuck(what: str) -> None:
    views, ranks = STUCK[what]
    assert stuck_ranks(views) == ranks


def test_a_silent_rank_becomes_overdue() -> None:
    assert not seen(1, seconds=30, silent=29).is_overdue(40)
    assert seen(1, seconds=30, silent=31).is_overdue(40)
    assert seen(1, seconds=61, silent=0).is_overdue(40)
    assert seen(1, seconds=1, silent=41).is_overdue(40), "whatever the limit of its place"


def test_limits_follow_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step has its own limit, so have saves; then at least five times the longest place so far."""
    now = [0.0]
    monkeypatch.setattr("megarun.launch.progress.time.monotonic", lambda: now[0])
    progress = Progress(Timeouts(100, 10))
    assert progress.limit == 100
    for step, seconds in ((1, 50), (2, 3)):
        progress.enter("computing", step)
        assert progress.limit == (100 if step == 1 else 10)
        now[0] += seconds
    progress.enter("saving")
    assert progress.limit == 100
    now[0] += 70
    progress.enter("computing", 3)
    assert progress.limit == 15, "the first step and saves do not count"
    assert progress.seconds == {"computing": 3, "saving": 70}


def test_an_operation_is_the_innermost_call() -> None:
    """The frames of this test are neither megarun's nor torch's; a frame of torch.distributed waits."""
    shown, waits = described(sys._getframe())
    assert "test_watch.py" in shown
    assert not waits

    def frame(path: str, back: Any = None) -> Any:
        return SimpleNamespace(f_code=SimpleNamespace(co_filename=path, co_name="f"), f_lineno=1, f_back=back)

    own = frame("/a/site-packages/megarun/engine/trainer.py")
    assert described(frame("/a/torch/distributed/distributed_c10d.py", own)) == (
        "megarun/engine/trainer.py:1 f, in torch/distributed/distributed_c10d.py:1 f",
        True,
    )
    hook = frame("/a/site-packages/megarun/model/mlp.py", frame("/a/torch/distributed/fsdp/hook.py"))
    assert described(hook) == ("megarun/model/mlp.py:1 f", False)


class Shared:
    """A store of threads, with a connection for each."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def clone(self) -> "Shared":
        return Shared(self._store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a watch ends the job, in place of which its thread ends."""
    found = threading.Event()

    def end(*_: Any) -> None:
        found.set()
        raise RuntimeError("ends the watching thread")

    monkeypatch.setattr(megarun.launch.watch, "exit_after_failure", end)
    return found


def test_a_rank_that_is_stopped_soon_after_its_start_is_found(ended: threading.Event, capfd: pytest.CaptureFixture[str]) -> None:
    """The only beat is of the first step, which may take half an hour; the other rank is past that step and does not wait so long."""
    store: Any = Shared(dist.HashStore())  # type: ignore[attr-defined]
    launches = [Launch(rank, 2, rank, store) for rank in range(2)]
    Watch(launches[0], Mesh(pp=2), Progress(), Interrupt())._publish()
    with Watch(launches[1], Mesh(pp=2), Progress(Timeouts(step=0.5)), Interrupt(), beat_seconds=0.1, silent_seconds=0.5):
        assert ended.wait(60)
    assert "rank 0 (pp 0) on " in capfd.readouterr().err


def test_a_report_is_printed_before_torchrun_kills() -> None:
    """It kills its processes 30 s after the signal: until then this rank waits, listens who still beats, and prints."""
    listening = SILENT_SECONDS + BEAT_SECONDS
    assert STOP_SECONDS + BEAT_SECONDS + listening + BEAT_SECONDS < 30


def test_the_job_ends_and_names_the_rank(ended: threading.Event, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 publishes once and is then stopped; rank 0 waits past its limit, says who is stuck, and ends."""
    store: Any = Shared(dist.HashStore())  # type: ignore[attr-defined]
    mesh = Mesh(pp=2)
    launches = [Launch(rank, 2, rank, store) for rank in range(2)]
    progress = Progress(Timeouts(1, 1))
    progress.enter("reading a batch", 7)
    stopped = Watch(launches[1], mesh, progress, Interrupt())
    stopped._publish()
    mine = Progress(Timeouts(1, 1))
    mine.enter("computing", 7)
    watch = Watch(launches[0], mesh, mine, Interrupt(), beat_seconds=0.1, silent_seconds=0.5)
    with watch:
        assert ended.wait(60)
    said = capfd.readouterr().err
    assert "rank 0 (pp 0) of 2 noticed:" in said
    assert said.count("error[MP660]") == 1
    assert f"rank 1 (pp 1) on {ME.host}, process {ME.pid}: no sign of life for" in said
    assert "step 7, reading a batch: " in said
    assert "rank 0 (pp 0), waiting for it:" in said
    assert "failed first" not in said


def test_a_rank_that_never_published_is_the_stuck_one(ended: threading.Event, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 is stopped before its first beat: the ranks that wait for it are not blamed."""
    store: Any = Shared(dist.HashStore())  # type: ignore[attr-defined]
    mine = Progress(Timeouts(1, 1))
    mine.enter("computing", 7)
    with Watch(Launch(0, 2, 0, store), Mesh(pp=2), mine, Interrupt(), beat_seconds=0.1, silent_seconds=0.5):
        assert ended.wait(60)
    said = capfd.readouterr().err
    assert "rank 1 (pp 1): no sign of life since the start" in said
    assert "rank 0 (pp 0), waiting for it:" in said


def test_the_first_beat_comes_at_once() -> None:
    store: Any = Shared(dist.HashStore())  # type: ignore[attr-defined]
    with Watch(Launch(0, 2, 0, store), Mesh(pp=2), Progress(Timeouts(60, 60)), Interrupt(), beat_seconds=3600):
        store.wait(["megarun/beat/0"])


def test_a_healthy_job_continues() -> None:
    store: Any = Shared(dist.HashStore())  # type: ignore[attr-defined]
    with Watch(Launch(0, 2, 0, store), Mesh(pp=2), Progress(Timeouts(60, 60)), Interrupt(), beat_seconds=0.01) as watch:
        time.sleep(0.2)
        assert watch._number > 2


HUNG = """
import sys, time, threading
import torch.distributed as dist
import megarun.launch.watch as watch
watch.STOP_SECONDS = 0.5
from megaplan.spec.models import Mesh
from megarun.launch.interrupt import Interrupt
from megarun.launch.process_group import Launch
from megarun.launch.progress import Progress, Timeouts
progress = Progress(Timeouts())
with Interrupt() as interrupt, watch.Watch(Launch(0, 1, 0, dist.HashStore()), Mesh(), progress, interrupt, 0.1, 0.5):
    progress.enter("computing", 1)
    print("here", flush=True)
    lock = threading.Lock()
    lock.acquire()
    while True:
        try:
            lock.acquire(timeout=3600)
        except BaseException:
            pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_hung_rank(number: int) -> None:
    """The main thread never returns to the loop, where signals are noticed."""
    path = os.pathsep.join(str(Path(__file__).parents[3] / name) for name in ("src", "kernels"))
    process = subprocess.Popen(
        [sys.executable, "-c", HUNG], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "error[MP660]" in said
    assert "step 1, computing" in said


def test_an_ignored_hangup_stays_ignored() -> None:
    """An ignored hangup stays ignored, as `nohup` needs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            end = time.monotonic() + 30
            while not interrupt.received and time.monotonic() < end:
                time.sleep(0.01)
            assert interrupt.received == interrupt.signalled == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stuck_process_of_this_machine_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process cannot exit; one whose process id is used again is left alone."""
    monkeypatch.setattr(os, "_exit", lambda _: None)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        stopped = ProcessIdentity(ME.host, process.pid, megarun.launch.process._start_ticks(process.pid), ME.namespace)
        ProcessIdentity(ME.host, process.pid, 1, ME.namespace).kill()
        ProcessIdentity(ME.host, process.pid, stopped.started, "another boot").kill()
        assert not stopped.has_ended
        process.send_signal(signal.SIGSTOP)
        store = dist.HashStore()  # type: ignore[attr-defined]
        store.set(megarun.launch.failure.STUCK, json.dumps([asdict(stopped), asdict(ME), {"host": 1}]))
        megarun.launch.failure.exit_after_failure(store, 2)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
