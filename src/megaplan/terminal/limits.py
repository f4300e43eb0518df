"""Limits of the process and of the machine as diagnostics: which one is reached, its value, and the command that raises it."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic

CODE = "MP493"
DEEPEST = 12
SHARED_MEMORY = "/dev/shm"
TEXTS = (
    ("too many open files", errno.EMFILE),
    ("can't start new thread", errno.EAGAIN),
    ("resource temporarily unavailable", errno.EAGAIN),
    ("cannot allocate memory", errno.ENOMEM),
    ("can't allocate memory", errno.ENOMEM),
    ("bad_alloc", errno.ENOMEM),
    ("file too large", errno.EFBIG),
    ("disk quota exceeded", errno.EDQUOT),
    ("no space left on device", errno.ENOSPC),
)
"""Parts, in lower case, of error texts that libraries raise without the system's error number."""


def limit_reached(error: BaseException) -> Diagnostic | None:
    """The reached limit that an error or its cause mentions; None if it mentions no limit."""
    for each in _chain(error):
        number = _number(each)
        if number in _DETAILS:
            path = each.filename if isinstance(each, OSError) and isinstance(each.filename, str) else ""
            detail, hint = _DETAILS[number](path)
            return diagnostic(CODE, detail, hints=(hint,))
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, errors of other ranks that it reports, and its causes."""
    pending, seen = [error], 0
    while pending and seen < DEEPEST:
        found, seen = pending.pop(0), seen + 1
        yield found
        failures = getattr(found, "failures", None)
        if isinstance(failures, dict):  # raised by torch's checkpoints: (error, frames) of each rank
            pending += [each[0] for each in failures.values() if isinstance(each, tuple) and each and isinstance(each[0], BaseException)]
        pending += [each for each in (found.__cause__, found.__context__) if each is not None]


def _number(error: BaseException) -> int | None:
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, RuntimeError):
        said = str(error).lower()
        return next((number for text, number in TEXTS if text in said), None)
    return None


def _soft(kind: int) -> str:
    value = resource.getrlimit(kind)[0]
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _of_container(name: str) -> str:
    """A limit of the process's control group; empty if there is no limit."""
    with suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[0].rpartition(":")[2]
        for folder in (Path("/sys/fs/cgroup") / group.lstrip("/"), Path("/sys/fs/cgroup")):
            if os.path.isfile(folder / name):
                found = (folder / name).read_text(encoding="utf-8").strip()
                return "" if found == "max" else f"; {name} of the container = {int(found):,}"
    return ""


def _descriptors(_: str) -> tuple[str, str]:
    return f"file descriptors of the process: ulimit -n = {_soft(resource.RLIMIT_NOFILE)}", "ulimit -n 65536"


def _files_of_system(_: str) -> tuple[str, str]:
    return "open files of the machine: fs.file-max", "sysctl fs.file-max fs.file-nr"


def _threads(_: str) -> tuple[str, str]:
    return (
        f"threads and processes of the user: ulimit -u = {_soft(resource.RLIMIT_NPROC)}{_of_container('pids.max')}",
        "ulimit -u 65536, or OMP_NUM_THREADS=1 for fewer threads",
    )


def _memory(_: str) -> tuple[str, str]:
    limit = f"ulimit -v = {_soft(resource.RLIMIT_AS)} bytes{_of_container('memory.max')}"
    return f"memory of the process: {limit}", "ulimit -v unlimited, or a machine with more memory: free -h"


def _file_size(path: str) -> tuple[str, str]:
    limit = f"ulimit -f = {_soft(resource.RLIMIT_FSIZE)} bytes"
    return f"size of a file: {limit}{f', at {path}' if path else ''}", "ulimit -f unlimited"


def _quota(path: str) -> tuple[str, str]:
    return f"disk quota of the user{f', at {path}' if path else ''}", "quota -s"


def _space(path: str) -> tuple[str, str]:
    free = ""
    if not path:
        with suppress(OSError):
            found = os.statvfs(SHARED_MEMORY)
            free = f"; {SHARED_MEMORY}, shared memory of processes, has {found.f_bavail * found.f_frsize:,} bytes free"
    where = path or "of the file system"
    hint = f"df -h {path}" if path else f"df -h . {SHARED_MEMORY}; docker run --shm-size=1g enlarges {SHARED_MEMORY} of a container"
    return f"space on a disk: {where}{free}", hint


_DETAILS: dict[int | None, Callable[[str], tuple[str, str]]] = {
    errno.EMFILE: _descriptors,
    errno.ENFILE: _files_of_system,
    errno.EAGAIN: _threads,
    errno.ENOMEM: _memory,
    errno.EFBIG: _file_size,
    errno.EDQUOT: _quota,
    errno.ENOSPC: _space,
}
