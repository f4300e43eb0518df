"""The folder of a run: used by one job at a time, and the same folder on every rank.

Rank 0 holds `run.lock` in it, with host, process and a token, and touches it every few seconds. Two jobs in one folder would mix their
metrics and remove each other's checkpoints. The token is also the probe: a rank that does not read it in its `--out` has another folder,
and no save would be complete.

A lock whose process has ended, or that no process has touched for half a minute, is taken over: a killed run leaves its lock. Times are
those of the file system, so that clocks of nodes may differ; an absolute time means nothing, only whether it changes.

A read must be confirmed before it ends a job: a lock that is unreadable or invisible does not belong to another job. Only the token of
another start, read twice, shows that the folder was taken over.
"""

import errno
import json
import os
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from megaplan.errors import MegaplanError
from megaplan.terminal.output import note
from megarun.data.identity import TOKENIZER
from megarun.errors import refusal
from megarun.files import open_own, read_bounded, refuse_link, write_whole
from megarun.launch.process import ProcessIdentity

LOCK, PLAN, JOB, MESSAGES = "run.lock", "plan.json", "job.json", "messages.txt"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
POLL_SECONDS = 0.5
DOUBT_SECONDS = 20.0
"""Time for which a reading that would end the job is tried again: a network file system answers with stale handles for some seconds."""
WRITTEN = (LOCK, PLAN, JOB, MESSAGES, TOKENIZER, "metrics.jsonl", "checkpoints", "tensorboard", "wandb", "upload")
"""Names that a run writes in its folder; none may be a link."""
MAX_LOCK_BYTES = 1 << 16
MAX_JOB_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Holder:
    """Content of a lock: the process that holds it, and a random token of this start of the run."""

    process: ProcessIdentity
    token: str

    @classmethod
    def this_process(cls) -> "Holder":
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
        self._lost: Holder | None = None
        self._identity: tuple[int, int] | None = None
        self._handle = -1

    def __enter__(self) -> "RunFolder":
        """Take the lock.

        Raises:
            MegaplanError: MP658 if another job holds it; MP670 if the folder cannot be written; MP671 if a link is in it where the run
                writes.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in WRITTEN:
                refuse_link(self._folder / name)
            if not self._created():
                self._wait_until_stale()
                self._replace()
            self._handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._identity = _identity(os.fstat(self._handle))
        except OSError as error:
            raise _unusable(self._folder, error) from None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(self._every)
        if self._handle >= 0:
            own = Path(f"/proc/self/fd/{self._handle}") / LOCK  # works also if the folder was renamed
            for path in (self._path, own):
                with suppress(OSError):
                    if _holder(path) == self.holder:
                        path.unlink()
            os.close(self._handle)
            self._handle = -1

    def require(self) -> None:
        """Refuse to write into a folder that was removed, or that another job has taken over while this one was stopped for long.

        Raises:
            MegaplanError: MP658; MP645 if the folder was removed or renamed.
        """
        if self._lost is not None:
            raise _held(self._path, self._lost)
        end = time.monotonic() + DOUBT_SECONDS
        while wrong := self._missing():
            if time.monotonic() >= end:
                raise refusal("MP645", f"{self._folder}: {wrong}", hints=(f"--out {self._folder}-2",), file=str(self._folder))
            time.sleep(POLL_SECONDS)

    def keep(self, name: str, text: str) -> None:
        """Write a text of the job to the folder, replacing an earlier start's.

        Raises:
            MegaplanError: MP670, it cannot be written.
        """
        try:
            write_whole(self._folder / name, text, self.holder.token)
        except OSError as error:
            raise _unusable(self._folder / name, error) from None

    def _missing(self) -> str:
        """Reason why the folder's path is not the folder that the run began with; empty if it is."""
        try:
            if _identity(self._folder.stat()) == self._identity:
                return ""
            what = "another folder has its name"
        except OSError as error:
            what = "it was removed or renamed" if error.errno == errno.ENOENT else error.strerror or str(error)
        with suppress(OSError):
            now = os.readlink(f"/proc/self/fd/{self._handle}")
            what += "; the run's folder was removed" if now.endswith(" (deleted)") else f"; the run's folder is {now}"
        return f"{what} while the run used it"

    def _created(self) -> bool:
        try:
            with open_own(self._path, os.O_EXCL) as file:
                file.write(self.holder.text().encode())
        except FileExistsError:
            return False
        return True

    def _wait_until_stale(self) -> None:
        """Return when the lock can be taken over.

        Raises:
            MegaplanError: MP658 if it is touched meanwhile, or its process runs on this machine.
        """
        other, touched = _patiently(self._path), _modified(self._path)
        if other is not None and other.process.has_ended:
            return
        if other is not None and other.process.is_local:
            raise _held(self._path, other)
        end = time.monotonic() + self._stale  # the lock's time may be in the future if the clock was set back
        if self._age(touched) < self._stale:
            note([f"{self._path}: {_text(other)} touched it; it is taken over if no process does for {self._stale:g} s"])
        while self._age(touched) < self._stale and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            if _modified(self._path) not in (touched, None):
                raise _held(self._path, _patiently(self._path))

    def _age(self, touched: float | None) -> float:
        """Seconds since then, by the clock of the file system; infinite if there is no lock."""
        if touched is None:
            return float("inf")
        probe = self._folder / f".{LOCK}.{self.holder.token}"
        try:
            with open_own(probe, os.O_EXCL) as file:
                return os.fstat(file.fileno()).st_mtime - touched
        finally:
            probe.unlink(missing_ok=True)

    def _replace(self) -> None:
        """Replace a stale lock by this process's; of two jobs that do so, the later one wins."""
        write_whole(self._path, self.holder.text(), self.holder.token)
        time.sleep(POLL_SECONDS)
        found = _patiently(self._path)
        if found is not None and found != self.holder:
            raise _held(self._path, found)

    def _beat(self) -> None:
        """Touch the lock; note the token of another start, if it is read twice."""
        suspect: Holder | None = None
        num_missed = 0
        while not self._over.wait(self._every):
            try:
                found = _holder(self._path)
                if found == self.holder:
                    os.utime(self._path, follow_symlinks=False)
                    suspect, num_missed = None, 0
                elif found is not None and found == suspect:
                    self._lost = found
                    return
                suspect = found if found != self.holder else None
            except FileNotFoundError:
                num_missed += 1
                if num_missed * self._every >= self._stale and self._is_ours():
                    with suppress(OSError, MegaplanError):  # the lock was removed by hand: other jobs must see that the folder is in use
                        num_missed = 0 if self._created() else num_missed
            except OSError:
                continue  # a temporary failure of the file system; saves report it

    def _is_ours(self) -> bool:
        """True if the folder is the one that the run began with, and no other start has written its own record into it."""
        try:
            found = json.loads(read_bounded(self._folder / JOB, MAX_JOB_BYTES))["token"]
        except FileNotFoundError:
            found = self.holder.token
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
        return not self._missing() and found == self.holder.token


def sees(folder: Path, token: str, seconds: float) -> str:
    """Reason why this process does not see the lock with this token; empty if it does.

    Args:
        folder: `--out` of this process.
        token: Token of rank 0's lock.
        seconds: Time to try: network file systems show new files after some seconds.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            found = _holder(folder / LOCK)
            if found is not None and found.token == token:
                return ""
            what = "it is not a lock" if found is None else f"held by {_text(found)}, not by rank 0 of this job"
        except OSError as error:
            what = "no such file" if error.errno == errno.ENOENT else error.strerror or str(error)
        if time.monotonic() >= end:
            return f"{folder / LOCK}: {what}"
        time.sleep(POLL_SECONDS)


def _held(path: Path, other: Holder | None) -> MegaplanError:
    return refusal("MP658", f"{path}: {_text(other)} uses the folder", hints=(f"--out {path.parent}-2",), file=str(path.parent))


def _text(other: Holder | None) -> str:
    return "another process" if other is None else f"process {other.process.pid} on {other.process.host}"


def _unusable(path: Path, error: OSError) -> MegaplanError:
    """MP670, with the part of the path that is the reason."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        blocking = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), path)
        reason = f"{blocking} is a file"
    elif error.errno == errno.ENAMETOOLONG:
        reason = f"{reason}: at most 255 bytes a name and 4,096 a path"
    return refusal("MP670", f"{path}: {reason}", file=str(path))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _holder(path: Path) -> Holder | None:
    """The content of a lock; None if it is not a lock's, for example while it is being written.

    Raises:
        OSError: It cannot be read.
    """
    try:
        found = json.loads(read_bounded(path, MAX_LOCK_BYTES))
        return Holder(ProcessIdentity.parse(found), str(found["token"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _patiently(path: Path) -> Holder | None:
    """The content of a lock, tried again while it cannot be read; None if there is no file, or it is not a lock.

    Raises:
        OSError: It cannot be read for `DOUBT_SECONDS`.
    """
    end = time.monotonic() + DOUBT_SECONDS
    while True:
        try:
            return _holder(path)
        except FileNotFoundError:
            return None
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(POLL_SECONDS)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
