"""Failures of a job with several ranks: the rank that failed first prints its error, and all ranks exit.

The other ranks fail as a consequence with a closed connection, or block in a collective that never completes.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, MegaplanError, render_diagnostic
from megaplan.spec.models import Mesh
from megaplan.terminal import output
from megaplan.terminal.exit_status import ERROR
from megaplan.terminal.limits import limit_reached
from megarun.errors import place, refusal
from megarun.launch.process import CONNECTION_LOST, ProcessIdentity, beat_key

if TYPE_CHECKING:
    from megarun.launch.process_group import Launch

FIRST, PRINTED, STUCK = "megarun/first_failure", "megarun/failure_printed", "megarun/stuck"
WAIT = timedelta(seconds=5)
POLL_SECONDS, GRACE_SECONDS = 1.0, 10.0
ENDING_SECONDS, ENDING_POLL_SECONDS = 3.0, 0.1
MISSING_PROCESS_CODES = frozenset({"MP650", "MP651", "MP652", "MP673"})


def report_failure(
    error: Exception, launch: Launch | None = None, mesh: Mesh | None = None, *, with_traceback: bool = False, noticed: bool = False
) -> None:
    """Print the error on stderr if this rank failed first; else wait until that rank has printed its own.

    Args:
        error: Exception that ended this rank.
        launch: Launch of the processes; None if the process has not joined the store; this function then joins it.
        mesh: Mesh of the plan if it is known, for the rank's coordinates.
        with_traceback: True to print the traceback too.
        noticed: True if the error is about another rank, which this one has noticed.
    """
    is_missing_process = isinstance(error, MegaplanError) and error.diagnostics[0].code in MISSING_PROCESS_CODES
    if launch is None and is_missing_process:
        launch = getattr(error, "launch", None)  # the ranks that joined can still share a store
    elif launch is None and "WORLD_SIZE" in os.environ:
        from megarun.launch.process_group import read_launch  # noqa: PLC0415  (loads torch, which one process that fails early does without)

        launch = read_launch()
    several = launch if launch is not None and launch.world_size > 1 else None
    if several is not None:
        if not _is_first(several):
            return
        known = mesh if mesh is not None and mesh.world_size == several.world_size else None
        if has_lost_peer(error):
            error, noticed = refusal("MP668", _account_of_ended(several, known, _cause(error))), True
        what = "noticed" if noticed else "failed first"
        output.note([f"{place(several.rank, known)} of {several.world_size} {what}:", ""])
    output.note(render_diagnostic(found) for found in diagnostics_of(error))
    if with_traceback:
        output.note(["".join(traceback.format_exception(error)).rstrip()])
    if several is not None:
        with suppress(RuntimeError):  # the rank that hosted the store has exited
            several.store.set(PRINTED, "1")


def exit_on_peer_failure(launch: Launch) -> None:
    """Exit this process silently a few seconds after another rank has printed its error.

    A rank of a failed job may block in a collective until a timeout of minutes, and torchrun stops only the ranks of its own machine. The
    store is polled through a separate connection, because the rank's own is busy while it waits.
    """
    if launch.world_size == 1:
        return
    store, over = launch.store.clone(), threading.Event()  # type: ignore[attr-defined]

    def watch() -> None:
        try:
            while not store.check([PRINTED]):
                if over.wait(POLL_SECONDS):
                    return
        except RuntimeError:
            pass  # torchrun (or rank 0 of processes started by hand) has exited, which ends the store
        if not over.wait(GRACE_SECONDS):
            exit_after_failure(store, ERROR)

    thread = threading.Thread(target=watch, name="first failure", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join(GRACE_SECONDS)

    # C++ threads abort at interpreter shutdown: the watching thread, which runs in the store's C++ code, is joined before that
    atexit.register(stop)


def exit_after_failure(store: Any, status: int) -> None:
    """Exit this process at once, after killing the stuck processes of its machine: one that is stopped cannot exit itself."""
    with suppress(RuntimeError, ValueError, KeyError, TypeError):
        if store.check([STUCK]):
            for each in json.loads(store.get(STUCK)):
                ProcessIdentity.parse(each).kill()
    _exit_now(status)


def exit_process(status: int) -> None:
    """Exit the process; without cleanup if the job has several ranks, because destroying a process group could deadlock."""
    if status == ERROR and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        _exit_now(status)
    raise SystemExit(status)


def _exit_now(status: int) -> NoReturn:
    """Exit without cleanup; output that the streams do not accept is lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # None if the process was started without an address
            stream.flush()
    os._exit(status)


def diagnostics_of(error: BaseException) -> Sequence[Diagnostic]:
    """The error as diagnostics; for an unexpected exception with its source location.

    torch's pipelining wraps a stage's exception in its own: the first exception of the chain is reported.
    """
    limit = limit_reached(error)
    error = _cause(error)
    if isinstance(error, MegaplanError):
        return error.diagnostics if limit is None else [*error.diagnostics, limit]
    if limit is not None:
        return [limit]
    if type(error).__name__ == "OutOfMemoryError":
        return [diagnostic("MP609", str(error).split(". ")[0])]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "megarun" in frame.filename.replace("\\", "/").split("/")] or list(frames)
    source = f" at {ours[-1].filename.rpartition('/megarun/')[2]}:{ours[-1].lineno}" if ours else ""
    return [diagnostic("MP610", f"{type(error).__name__}: {error}{source}")]


def has_lost_peer(error: BaseException) -> bool:
    """True if the error is that another process of the job has ended, which closed its connections."""
    found = _cause(error)
    return isinstance(found, RuntimeError) and any(text in str(found) for text in CONNECTION_LOST)


def _cause(error: BaseException) -> BaseException:
    """The first exception of the chain, or the first that has diagnostics."""
    while error.__cause__ is not None and not isinstance(error, MegaplanError):
        error = error.__cause__
    return error


def _account_of_ended(launch: Launch, mesh: Mesh | None, error: BaseException) -> str:
    """The ranks of this machine that have ended, with their last place, and the connection that was lost."""
    lines: list[str] = []
    end = time.monotonic() + ENDING_SECONDS
    with suppress(RuntimeError, ValueError, KeyError, TypeError):  # the store ends with the rank or torchrun that keeps it
        while not lines and time.monotonic() < end:  # the kernel closes a process's connections before the process ends
            for rank in range(launch.world_size):
                if rank != launch.rank and launch.store.check([beat_key(rank)]):
                    beat = json.loads(launch.store.get(beat_key(rank)))
                    if ProcessIdentity.parse(beat["process"]).has_ended:
                        lines.append(f"{place(rank, mesh)}: its process has ended; last seen in step {beat['step']}, {beat['place']}")
            time.sleep(ENDING_POLL_SECONDS)
    lines = lines or ["no process of this machine has ended; the failed one is on another machine, or has not reported yet"]
    return "\n".join([*lines, str(error).splitlines()[0][:300]])


def _is_first(launch: Launch) -> bool:
    """Try to register as the first failed rank; if another one is first, wait until it has printed its error."""
    mine = str(launch.rank)
    try:
        if launch.store.compare_set(FIRST, "", mine) == mine.encode():
            return True
    except RuntimeError:  # the rank that hosts the store has exited; unless it was killed, it exits after the first error is printed
        output.note([f"rank {launch.rank}: the store of the job is closed, so the first failure is unknown"])
        return False
    try:
        launch.store.wait([PRINTED], WAIT)
    except RuntimeError:  # raised by the store when the wait times out
        output.note([f"rank {launch.rank}: another rank failed first and has not reported within {WAIT.seconds} s"])
    return False
