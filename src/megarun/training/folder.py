"""The folder of a run: used by one job at a time, and the same folder on every rank.

Rank 0 holds `run.lock` in it, with host, process and a token, and touches it every few seconds. Two jobs in one folder would mix their
metrics and remove each other's checkpoints. The token is also the probe: a rank that does not read it in its `--out` has another folder,
and no save would be complete.

A lock whose process has ended, or that no process has touched for half a minute, is taken over: a killed run leaves it behind. Times are
those of the file system, so that clocks of nodes may differ.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from megarun.errors import refusal
from megarun.files import read_bounded
from megarun.launch.process import ProcessIdentity

LOCK, PLAN = "run.lock", "plan.json"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
POLL_SECONDS = 0.5
MAX_LOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Holder:
    """Content of a lock: the process that holds it, and a random token of this start of the run."""

    process: ProcessIdentity
    token: str

    @classmethod
    def this_process(cls) -> Holder:
        """This process, with a new token."""
        return cls(ProcessIdentity.own(), secrets.token_hex(16))

    def text(self) -> str:
        """The text of the lock."""
        return json.dumps(asdict(self.process) | {"token": self.token})


class RunFolder:
    """Locks a folder while it is entered.

    Args:
        folder: Folder of the run, which is made if it does not exist.
        stale_seconds: Age at which a lock of another machine is taken over.
        heartbeat_seconds: Time between two touches.
    """

    def __init__(self, folder: Path, stale_seconds: float = STALE_SECONDS, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._stale, self._every = stale_seconds, heartbeat_seconds
        self.holder = Holder.this_process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._lost = False

    def __enter__(self) -> RunFolder:
        """Take the lock.

        Raises:
            MegaplanError: MP658 if another job holds it; MP608 if the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._created():
                self._wait_until_stale()
                self._replace()
        except OSError as error:
            raise refusal("MP608", f"{self._path}: {error.strerror or error}", file=str(self._folder)) from None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(self._every)
        if _holder(self._path) == self.holder:
            with suppress(OSError):
                self._path.unlink()

    def require(self) -> None:
        """Refuse to write into a folder that another job has taken over, which happens to a job that was stopped for long.

        Raises:
            MegaplanError: MP658.
        """
        if self._lost:
            raise _held(self._path, _holder(self._path))

    def write_plan(self, text: str) -> None:
        """Keep the plan that the run trains next to its metrics, for `megaplan calibrate`; another plan's is replaced.

        Raises:
            MegaplanError: MP608, it cannot be written.
        """
        new = self._folder / f".{PLAN}.{self.holder.token}"
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(self._folder / PLAN)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            raise refusal("MP608", f"{self._folder / PLAN}: {error.strerror or error}", file=str(self._folder)) from None

    def _created(self) -> bool:
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(self.holder.text())
        return True

    def _wait_until_stale(self) -> None:
        """Return when the lock can be taken over.

        Raises:
            MegaplanError: MP658 if it is touched meanwhile, or its process runs on this machine.
        """
        other, touched = _holder(self._path), _modified(self._path)
        if other is not None and other.process.has_ended:
            return
        if other is not None and other.process.is_local:
            raise _held(self._path, other)
        while self._age(touched) < self._stale:
            time.sleep(POLL_SECONDS)
            if _modified(self._path) != touched:
                raise _held(self._path, _holder(self._path))

    def _age(self, touched: float | None) -> float:
        """Seconds since then, by the clock of the file system; infinite if there is no lock."""
        if touched is None:
            return float("inf")
        probe = self._folder / f".{LOCK}.{self.holder.token}"
        try:
            probe.touch()
            return probe.stat().st_mtime - touched
        finally:
            probe.unlink(missing_ok=True)

    def _replace(self) -> None:
        """Put this process's lock in the place of a stale one; of two jobs that do, the later one has it."""
        new = self._folder / f".{LOCK}.{self.holder.token}"
        new.write_text(self.holder.text(), encoding="utf-8")
        new.rename(self._path)
        time.sleep(POLL_SECONDS)
        found = _holder(self._path)
        if found != self.holder:
            raise _held(self._path, found)

    def _beat(self) -> None:
        while not self._over.wait(self._every):
            try:
                if _holder(self._path) != self.holder:
                    self._lost = True
                    return
                os.utime(self._path)
            except OSError:
                continue  # a file system that fails for a short time; saves and metrics report it


def sees(folder: Path, token: str, seconds: float) -> str:
    """Reason why this process does not see the lock with this token; empty if it does.

    Args:
        folder: `--out` of this process.
        token: Token of rank 0's lock.
        seconds: Time to try: network file systems show new files after some seconds.
    """
    end = time.monotonic() + seconds
    while (found := _holder(folder / LOCK)) is None or found.token != token:
        if time.monotonic() >= end:
            other = None if found is None else found.process
            what = "no such file" if other is None else f"held by process {other.pid} on {other.host}, not by rank 0 of this job"
            return f"{folder / LOCK}: {what}"
        time.sleep(POLL_SECONDS)
    return ""


def _held(path: Path, other: Holder | None) -> Exception:
    who = "another process" if other is None else f"process {other.process.pid} on {other.process.host}"
    return refusal("MP658", f"{path}: {who} uses the folder", hints=(f"--out {path.parent}-2",), file=str(path.parent))


def _holder(path: Path) -> Holder | None:
    try:
        found = json.loads(read_bounded(path, MAX_LOCK_BYTES))
        return Holder(ProcessIdentity.parse(found), str(found["token"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
