"""A job in its own process, forked from one that has torch loaded and no CUDA; its lines come back through a pipe."""

import ctypes
import errno
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.checks import Emit, said

MOST_SHOWN = 200
"""Characters of a line that is not JSON, or of a log's end, that a failure quotes."""
ENDS_WITH_PARENT = 1
"""prctl's option PR_SET_PDEATHSIG."""


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement.

    Attributes:
        kind: `facts`, `checks`, `times`, `train` or `memory`.
        name: Unique with its kind.
        run: Does it, in its own process, and emits each line as soon as it is known.
        seconds: Time after which it is stopped.
        least: Time left that it needs to be started.
        lane: Jobs of one lane may run together; those of two never do.
        gib: Device memory that the job may use; jobs that run together use no more than the device has.
    """

    kind: str
    name: str
    run: Callable[[Emit], None]
    seconds: float
    least: float
    lane: str = "alone"
    gib: float = 1.0

    @property
    def id(self) -> str:
        """Name of the job in the file of results."""
        return f"{self.kind}/{self.name}"


@dataclass(slots=True)
class Running:
    """A started job.

    Attributes:
        job: The job that runs.
        pid: The job's process, which leads a process group.
        pipe: Pipe from which the job's lines are read.
        log: File with the job's output and errors.
        stop: Time at which it is stopped.
        began: Time of its start.
        rest: The beginning of a line that is not complete.
        num_lines: Lines that were JSON.
        garbage: The first line that was not.
        failure: The job's own account of its failure.
        stopped: True if it was stopped at its deadline.
    """

    job: Job
    pid: int
    pipe: int
    log: Path
    stop: float
    began: float
    rest: bytes = b""
    num_lines: int = 0
    garbage: str = ""
    failure: str = ""
    stopped: bool = False
    status: int | None = field(default=None)


def start(job: Job, log: Path, seconds: float) -> Running:
    """Fork a process that runs the job and ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    now = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run(job, log, write, read)
    os.close(write)
    os.set_blocking(read, False)
    return Running(job, pid, read, log, now + seconds, now)


def _run(job: Job, log: Path, write: int, read: int) -> None:
    status = 70
    try:
        os.setsid()
        os.close(read)
        _die_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(output, number)
        job.run(lambda line: _write(write, line))
        status = 0
    except BaseException as failure:  # a separate process: its error is reported and ends nothing else
        traceback.print_exc()
        _write(write, {"failed": said(failure)})
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    try:
        ctypes.CDLL(None).prctl(ENDS_WITH_PARENT, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux: only the deadline limits the worker
        return


def _write(pipe: int, line: dict[str, Any]) -> None:
    data = json.dumps(finite(line)).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def finite(value: Any) -> Any:
    """The value with text for numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def read_lines(running: Running) -> list[dict[str, Any]]:
    """The complete lines that have arrived; what is not a JSON object is kept as garbage."""
    while True:
        try:
            part = os.read(running.pipe, 1 << 16)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                break
            raise
        if not part:
            break
        running.rest += part
    *whole, running.rest = running.rest.split(b"\n")
    found = []
    for line in whole:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            running.garbage = running.garbage or repr(line[:MOST_SHOWN])
        elif "failed" in value:
            running.failure = str(value["failed"])
        else:
            running.num_lines += 1
            found.append(value)
    return found


def has_ended(running: Running) -> bool:
    """True once the process has ended; it is stopped at its deadline."""
    if running.status is not None:
        return True
    pid, status = os.waitpid(running.pid, os.WNOHANG)
    if pid:
        running.status = status
        kill(running)  # what it may have left
        return True
    if time.monotonic() > running.stop and not running.stopped:
        running.stopped = True
        kill(running)
    return False


def kill(running: Running) -> None:
    """End the job's processes."""
    try:
        os.killpg(running.pid, signal.SIGKILL)
    except ProcessLookupError:
        if running.status is None:  # the worker has not made its process group yet
            os.kill(running.pid, signal.SIGKILL)
    except PermissionError:
        return


def outcome(running: Running) -> dict[str, Any]:
    """The job's last line: `done`, or how it ended."""
    seconds = round(time.monotonic() - running.began, 2)
    if running.rest.strip() and not running.garbage:
        running.garbage = repr(running.rest[:MOST_SHOWN])
    status = running.status or 0
    if running.stopped:
        found = {"status": "timeout", "failure": f"stopped after {seconds:.0f} s"}
    elif os.WIFSIGNALED(status):
        found = {"status": "killed", "failure": f"signal {signal.Signals(os.WTERMSIG(status)).name}"}
    elif status or running.failure:
        found = {"status": "failed", "failure": running.failure or f"exit status {os.WEXITSTATUS(status)}"}
    elif running.garbage:
        found = {"status": "garbage", "failure": f"wrote {running.garbage}"}
    elif not running.num_lines:
        found = {"status": "failed", "failure": "wrote nothing"}
    else:
        found = {"status": "done"}
    if found["status"] != "done" and (end := _end_of(running.log)):
        found["log"] = end
    return {**found, "seconds": seconds}


def _end_of(log: Path) -> str:
    text = log.read_bytes()[-4096:].decode(errors="replace").strip() if log.exists() else ""
    return text.splitlines()[-1][-MOST_SHOWN:] if text else ""
