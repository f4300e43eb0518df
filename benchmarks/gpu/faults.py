"""Failures put into jobs on purpose, to show that the other jobs continue."""

import ctypes
import os
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import replace

from gpu.checks import Emit
from gpu.worker import Job


def raises(emit: Emit) -> None:
    """An exception after a first line."""
    emit({"before": "the failure"})
    raise RuntimeError("injected")


def hangs(emit: Emit) -> None:
    """No end."""
    emit({"before": "the failure"})
    time.sleep(1e6)


def crashes(emit: Emit) -> None:
    """A segmentation fault."""
    emit({"before": "the failure"})
    ctypes.string_at(0)


def is_killed(emit: Emit) -> None:
    """End the process by SIGKILL, as the kernel does when memory runs out."""
    emit({"before": "the failure"})
    os.kill(os.getpid(), signal.SIGKILL)


def babbles(emit: Emit) -> None:
    """Bytes that are not JSON, in the pipe itself."""
    emit({"before": "the failure"})
    for descriptor in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"\x00\xff{ no JSON\n")
        except OSError:
            continue


FAULTS: dict[str, Callable[[Emit], None]] = {
    "exception": raises,
    "timeout": hangs,
    "segfault": crashes,
    "sigkill": is_killed,
    "garbage": babbles,
}


def broken(job: Job, fault: str) -> Job:
    """The job with the fault in its place."""
    return replace(job, run=FAULTS[fault], seconds=min(job.seconds, 1.0) if fault == "timeout" else job.seconds)
