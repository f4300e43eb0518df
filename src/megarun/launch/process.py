"""The identity of a process, which shows if it still runs.

A process id alone is not sufficient: it is reused, and has no meaning on another machine.
"""

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONNECTION_LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "failed to recv, got 0 bytes"),
    *("remote process exited", "ncclRemoteError"),
)
"""Messages of gloo, NCCL and torch's store when a process at the other end has ended; each is a `RuntimeError` of torch."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one machine.

    Attributes:
        host: Host name.
        pid: Process id in its namespace.
        started: Start time in clock ticks since boot.
        namespace: Boot and namespace that give the process id its meaning; empty if unknown.
    """

    host: str
    pid: int
    started: int
    namespace: str

    @classmethod
    def own(cls) -> "ProcessIdentity":
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Another process of this machine."""
        return cls(socket.gethostname(), pid, _start_ticks(pid), _namespace())

    @classmethod
    def parse(cls, values: Any) -> "ProcessIdentity":
        """The identity from a JSON document.

        Raises:
            KeyError, TypeError, ValueError: The text is not such a record.
        """
        return cls(str(values["host"]), int(values["pid"]), int(values["started"]), str(values["namespace"]))

    @property
    def is_local(self) -> bool:
        """True if its process id is one of this machine and namespace."""
        return bool(self.namespace) and self.namespace == _namespace()

    @property
    def has_ended(self) -> bool:
        """True if it is known to have ended; False if it runs, or on another machine."""
        if not self.is_local:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # it runs as another user
        started = _start_ticks(self.pid)
        return started not in (self.started, 0)  # 0: unknown, for example if no file descriptor is left

    def kill(self) -> None:
        """SIGKILL, if it is another process of this machine that still runs."""
        if self.is_local and not self.has_ended and self.pid != os.getpid():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def beat_key(rank: int) -> str:
    """Key in the job's store of a rank's published place and process."""
    return f"megarun/beat/{rank}"


def _start_ticks(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 if unknown, -1 if it has ended and its parent has not yet read its status."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return -1 if values[0] in "ZX" else int(values[19])
    except (OSError, ValueError, IndexError):
        return 0


def _namespace() -> str:
    """Boot and process-id namespace of this process; empty if the system does not provide it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
