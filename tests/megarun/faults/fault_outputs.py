"""Faults of a run's files: outputs that are lost, links, files replaced between two looks, a restart after a change."""

import contextlib
import errno
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fault_bench import ERROR, SPEC, STEPS, Bench, Case, Outcome, first_line, losses, newest_step
from fault_launch import START_LIMIT_SECONDS

from megarun.checkpoint import keeper
from megarun.checkpoint.index import INDEX
from megarun.checkpoint.manifest import PLAN, list_checkpoints
from megarun.cli.main import run
from megarun.engine.trainer import Trainer
from megarun.metrics.file import FILE_NAME
from megarun.training import folder as run_folder
from megarun.training.folder import LOCK, MESSAGES

DATA = "__0_0.distcp"
AT = 5  # steps that are done when the fault happens: checkpoints after 2 and 4


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute replaced while the body runs."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def at_step(action: Callable[[], Any]) -> Iterator[None]:
    """Act before the update that follows `AT` steps."""
    real, done = Trainer.update, [False]

    def update(self: Trainer, step: int) -> None:
        if step == AT and not done[0]:
            done[0] = True
            action()
        real(self, step)

    with replaced(Trainer, "update", update):
        yield


def trains_on(bench: Bench, name: str, happened: str, out: Path, said: str, seconds: float, wanted: str) -> Outcome:
    """The run has trained all its steps, with the losses of one that nothing disturbs."""
    assert losses(out) == bench.expected, name
    assert newest_step(out) == STEPS
    return Outcome(happened, first_line(said, wanted), 0, seconds, 0)


def lost_output(bench: Bench, what: str) -> Outcome:
    """stderr or stdout accepts nothing: the file of messages has stderr's lost text."""
    out, streams = bench.folder / f"lost-{what}", {"stderr": io.StringIO(), "stdout": io.StringIO()}
    streams[what] = Full()
    began = time.monotonic()
    with contextlib.redirect_stderr(streams["stderr"]), contextlib.redirect_stdout(streams["stdout"]):
        status = run(bench.words(bench.one, out))
    assert status == 0
    said = (out / MESSAGES).read_text() if what == "stderr" else streams["stderr"].getvalue()
    wanted = f"step {STEPS}/{STEPS}" if what == "stderr" else "lines could not be written"
    return trains_on(bench, what, f"{what} is on a full disk", out, said, time.monotonic() - began, wanted)


def lost_metrics(bench: Bench, what: str) -> Outcome:
    """metrics.jsonl is removed, or its disk is full for some steps."""
    out, real = bench.folder / f"metrics-{what}", os.write
    wanted = "made again with all its lines" if what == "removed" else "the run continues"

    def write(handle: int, data: bytes) -> int:
        if b'"step": 6' in data and not failed:
            failed.append(handle)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    failed: list[int] = []
    faulty = replaced(os, "write", write) if what == "full" else at_step((out / FILE_NAME).unlink)
    with faulty:
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert status == 0, said
    happened = "metrics.jsonl is removed while the run lasts" if what == "removed" else "the disk of metrics.jsonl is full for a step"
    return trains_on(bench, what, happened, out, said, seconds, wanted)


def folder_renamed(bench: Bench) -> Outcome:
    """`--out` is renamed: the next save ends the run, and nothing is written under the old name."""
    out, new = bench.folder / "moved", bench.folder / "moved-away"
    with replaced(run_folder, "DOUBT_SECONDS", 1.0), at_step(lambda: rename_after_save(out, new)):
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert status == ERROR, said
    assert not out.exists()
    assert f"the run's folder is {new}" in said
    lost = bench.resume(new, 4)[1]
    return Outcome("--out is renamed while the run lasts", first_line(said, "error[MP645]"), lost, seconds, status)


def rename_after_save(out: Path, new: Path) -> None:
    """Rename the folder of a run when its last save, which a thread writes, is complete."""
    end = time.monotonic() + START_LIMIT_SECONDS
    while newest_step(out) < AT - 1 and time.monotonic() < end:
        time.sleep(0.01)
    out.rename(new)


def link_of_a_save(bench: Bench) -> Outcome:
    """The folder of the next save is a link to another folder, which stays as it is."""
    out, victim = bench.folder / "linked", bench.folder / "victim"
    victim.mkdir()
    (victim / "precious").write_text("precious")

    def link() -> None:
        (out / "checkpoints" / ".step-00000006.partial").symlink_to(victim)

    with at_step(link):
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert status == ERROR, said
    assert [path.name for path in victim.iterdir()] == ["precious"]
    lost = bench.resume(out, 4)[1]
    return Outcome("the folder of the next save is a link to another one", first_line(said, "is a link to"), lost, seconds, status)


def link_of_metrics(bench: Bench) -> Outcome:
    out, victim = bench.folder / "linked-metrics", bench.folder / "precious"
    victim.write_text("precious")
    out.mkdir()
    (out / FILE_NAME).symlink_to(victim)
    status, said, seconds = bench.here(bench.words(bench.one, out))
    assert status == ERROR, said
    assert victim.read_text() == "precious"
    return Outcome("metrics.jsonl is a link to another file", first_line(said, "error[MP671]"), None, seconds, status)


def swapped(bench: Bench) -> Outcome:
    """The newest checkpoint gets the files of another run between the comparison of sums and the reading of tensors."""
    out, other = bench.folder / "swapped", bench.folder / "other-seed"
    for folder, more in ((out, []), (other, ["--seed", "7"])):
        assert bench.here([*bench.words(bench.one, folder), "--steps", "6", *more])[0] == 0
    real, newest = keeper.load_checkpoint, list_checkpoints(out)[0]

    def load(found: Any, *args: Any, **named: Any) -> Any:
        if found.path == newest:
            for name in (DATA, INDEX, PLAN):
                shutil.copyfile(list_checkpoints(other)[0] / name, newest / "new")
                (newest / "new").replace(newest / name)
        return real(found, *args, **named)

    began = time.monotonic()
    with replaced(keeper, "load_checkpoint", load):
        said, lost = bench.resume(out, 4)
    happened = "files of the newest checkpoint are replaced after their sums were compared"
    return Outcome(happened, first_line(said, "warning[MP646]"), lost, time.monotonic() - began, 0)


def lock_hiccup(bench: Bench, what: str) -> Outcome:
    """run.lock cannot be read, or is out of sight, for longer than some heartbeats."""
    out, real = bench.folder / f"hiccup-{what}", run_folder.read_bounded

    def read(path: Path, max_bytes: int) -> str:
        if path.name == LOCK:
            raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)))
        return real(path, max_bytes)

    def hide() -> None:
        if what == "away":
            (out / LOCK).rename(out / "away")
        else:
            run_folder.read_bounded = read
        time.sleep(0.3)
        if what == "away":
            (out / "away").rename(out / LOCK)
        run_folder.read_bounded = real

    with replaced(run_folder.RunFolder.__init__, "__defaults__", (run_folder.STALE_SECONDS, 0.02)), at_step(hide):
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert status == 0, said
    happened = "run.lock is out of sight for a while" if what == "away" else f"run.lock cannot be read for a while ({what})"
    return trains_on(bench, what, happened, out, said, seconds, f"step {STEPS}/{STEPS}")


def lock_of_the_future(bench: Bench) -> Outcome:
    """The lock of a container that has ended, touched when the clock was ahead."""
    out = bench.folder / "future"
    out.mkdir()
    document = json.loads(run_folder.Holder.this_process().text())
    (out / LOCK).write_text(json.dumps(document | {"host": "node7", "namespace": "another"}))
    os.utime(out / LOCK, (time.time() + 3600, time.time() + 3600))
    with replaced(run_folder.RunFolder.__init__, "__defaults__", (1.0, run_folder.HEARTBEAT_SECONDS)):
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert status == 0, said
    return trains_on(bench, "future", "a killed job has left a lock of the future", out, said, seconds, "node7 touched it")


def changed_plan(bench: Bench) -> Outcome:
    """torchrun restarts a job whose plan file has another learning rate by now."""
    out, plan = bench.folder / "changed-plan", bench.plan("changing", {})
    environment = {"TORCHELASTIC_RUN_ID": "a-job", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= environment

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    try:
        with at_step(fail):
            assert bench.here(bench.words(plan, out))[0] == ERROR
        training = {**SPEC["training"], "learning_rate": 2 * SPEC["training"]["learning_rate"]}
        bench.plan("changing", {"training": training})
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        status, said, seconds = bench.here(bench.words(plan, out))
    finally:
        for name in environment:
            del os.environ[name]
    assert status == 0, said
    assert "warning[MP674]" in said
    return trains_on(
        bench, "plan", "the plan file changes, then a rank fails and torchrun restarts", out, said, seconds, "has changed since"
    )


OUTPUTS: dict[str, Case] = {
    "stderr full": lambda bench: lost_output(bench, "stderr"),
    "stdout full": lambda bench: lost_output(bench, "stdout"),
    "metrics removed": lambda bench: lost_metrics(bench, "removed"),
    "metrics on a full disk": lambda bench: lost_metrics(bench, "full"),
    "out renamed": folder_renamed,
    "link of a save": link_of_a_save,
    "link of the metrics": link_of_metrics,
    "checkpoint swapped": swapped,
    "lock unreadable": lambda bench: lock_hiccup(bench, "EIO"),
    "lock stale": lambda bench: lock_hiccup(bench, "ESTALE"),
    "lock away": lambda bench: lock_hiccup(bench, "away"),
    "lock of the future": lock_of_the_future,
    "plan changed": changed_plan,
}
