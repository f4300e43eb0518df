"""Faults of a storage that keeps checkpoints, here a folder behind `file://`; tests/storage breaks an S3 server."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fault_bench import ERROR, STEPS, Bench, Outcome, first_line, flip, losses, newest_step
from fault_launch import START_LIMIT_SECONDS

import megarun.remote
from megarun.checkpoint.manifest import list_checkpoints
from megarun.checkpoint.remote import Owner
from megarun.remote import RemotePath, any_path

AT = 6
KILLED = f"""
import os, signal, sys
from megarun.remote import RemotePath
name = sys.argv.pop(1)
for method in ("upload", "write_bytes"):
    def strike(self, *arguments, _works=getattr(RemotePath, method)):
        if str(self).endswith("step-{AT:08d}/" + name):
            os.kill(os.getpid(), signal.SIGKILL)
        return _works(self, *arguments)
    setattr(RemotePath, method, strike)
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


def _storage(bench: Bench, name: str) -> tuple[Any, RemotePath, list[str]]:
    """The output folder, the storage, and the words that name it."""
    root = any_path(f"file://{bench.folder}/storage-{name}")
    assert isinstance(root, RemotePath)
    return bench.folder / f"out-{name}", root, ["--checkpoint-url", str(root)]


def _resumed(bench: Bench, out: Any, words: list[str], newest: int) -> tuple[str, int]:
    """Message of a resume of one process, and the steps that it makes again; its losses are the uninterrupted ones."""
    made = max(losses(out), default=0)
    status, said, _ = bench.here([*bench.words(bench.one, out), *words])
    assert status == 0, said
    found = re.search(r"(\d+) steps done", said)
    assert found is not None
    assert int(found[1]) >= newest
    assert losses(out) == bench.expected
    return first_line(said, "resumed from"), max(0, made - int(found[1]))


def killed_in_an_upload(bench: Bench, rank: int, name: str) -> Outcome:
    """kill -9 of a rank while an object of a save is on its way."""
    out, root, words = _storage(bench, f"killed-{rank}-{name}")
    program, said = bench.folder / "killed.py", bench.folder / f"killed-{rank}-{name}.txt"
    program.write_text(KILLED)
    process = bench.launch(out, said, *words, program=[str(program), name])
    seconds = process.end(START_LIMIT_SECONDS)
    assert process.status != 0
    assert newest_step(root) == AT - 2, said.read_text()
    read, lost = _resumed(bench, out, words, AT - 2)
    return Outcome(f"kill -9 of rank {rank} while it uploads {name} to a storage", read, lost, seconds, process.status)


@contextmanager
def _outage(method: str, matching: str) -> Iterator[None]:
    """Every call of a file system's method on a matching path fails."""
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

    works, pause = getattr(LocalFileSystem, method), megarun.remote.FIRST_PAUSE_SECONDS

    def fails(self: Any, *arguments: Any, **named: Any) -> Any:
        if any(matching in str(each) for each in arguments):
            raise OSError("503 Slow Down")
        return works(self, *arguments, **named)

    setattr(LocalFileSystem, method, fails)
    megarun.remote.FIRST_PAUSE_SECONDS = 0.0
    try:
        yield
    finally:
        setattr(LocalFileSystem, method, works)
        megarun.remote.FIRST_PAUSE_SECONDS = pause


def outage_in_a_save(bench: Bench) -> Outcome:
    out, root, words = _storage(bench, "outage")
    with _outage("put_file", f"step-{AT:08d}"):
        status, said, seconds = bench.here([*bench.words(bench.one, out), *words])
    assert status == ERROR, said
    assert newest_step(root) == AT - 2
    _, lost = _resumed(bench, out, words, AT - 2)
    return Outcome("a storage answers an upload with errors for longer than it is tried again", _said(said, "MP645"), lost, seconds, status)


def outage_at_a_start(bench: Bench) -> Outcome:
    """It is not a reason to begin at step 0."""
    out, root, words = _storage(bench, "start")
    assert bench.here([*bench.words(bench.one, out), *words, "--steps", "4"])[0] == 0
    elsewhere = bench.folder / "out-start-elsewhere"
    with _outage("cat_file", "manifest.json"):
        status, said, seconds = bench.here([*bench.words(bench.one, elsewhere), *words])
    assert status == ERROR, said
    assert newest_step(root) == 4
    assert not losses(elsewhere)
    _, lost = _resumed(bench, out, words, 4)
    return Outcome("a storage answers with errors when a run resumes", _said(said, "MP666"), lost, seconds, status)


def damaged_object(bench: Bench) -> Outcome:
    out, root, words = _storage(bench, "damaged")
    assert bench.here([*bench.words(bench.one, out), *words, "--steps", str(AT)])[0] == 0
    newest = bench.folder / "storage-damaged" / "checkpoints" / list_checkpoints(root)[0].name
    flip(newest / "__0_0.distcp")
    read, lost = _resumed(bench, out, words, AT - 2)
    return Outcome("a bit of an object of the newest checkpoint in a storage flipped", read, lost, 0.0, 0)


def claimed_by_another_job(bench: Bench) -> Outcome:
    """The later one of two jobs with one storage has it; the other one's next save fails."""
    out, root, words = _storage(bench, "claimed")
    require, calls = Owner.require, []

    def claimed(self: Owner) -> None:
        calls.append(self)
        if len(calls) == 5:  # twice a save: before it, and before its commit
            Owner(root).claim()
        require(self)

    Owner.require = claimed  # type: ignore[method-assign]
    try:
        status, said, seconds = bench.here([*bench.words(bench.one, out), *words])
    finally:
        Owner.require = require  # type: ignore[method-assign]
    assert status == ERROR, said
    assert newest_step(root) == 4
    _, lost = _resumed(bench, out, words, 4)
    return Outcome("another job takes the storage of a run", _said(said, "MP658"), lost, seconds, status)


def _said(text: str, code: str) -> str:
    return first_line(text, f"error[{code}]")


STORAGE: dict[str, Callable[[Bench], Outcome]] = {
    "storage: rank 1 killed in an upload": lambda bench: killed_in_an_upload(bench, 1, "__1_0.distcp"),
    "storage: rank 0 killed before the commit": lambda bench: killed_in_an_upload(bench, 0, "manifest.json"),
    "storage: outage in a save": outage_in_a_save,
    "storage: outage at a start": outage_at_a_start,
    "storage: damaged object": damaged_object,
    "storage: claimed by another job": claimed_by_another_job,
}
assert STEPS > AT
