"""Compiles a run's kernels while its processes start, connect and build the model, so that the first step finds them in Triton's cache.

The first process of each machine forks a compiler before it starts CUDA or a thread, and sends it the device once known; before the first
step every process waits for its machine's compiler. A failure here only costs time: the kernels are then compiled when they are first
launched, one after another.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from megaplan.budget.peaks import build_budget
from megarun.job.job import Job
from megarun.kernels.cache import cache_folder, settle
from megarun.kernels.compiler import Compiled, compile_kernels, default_processes, end_with
from megarun.kernels.target import Target

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

DONE = "megarun/kernels"
POLL_SECONDS = 0.1
LONGEST_SECONDS = 900.0
"""After this time a process continues, and compiles its remaining kernels itself."""
LOCAL_RANK, LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"


class Outcome(NamedTuple):
    """Result of compiling the kernels of a machine.

    Attributes:
        found: Kernels that its ranks launch.
        compiled: Number of these kernels that were compiled.
        seconds: Time from the device's being known to the last kernel.
        failed: Kernels that did not compile, with the compiler's word.
        error: Reason why not all kernels are known or compiled; empty if they are.
    """

    found: int = 0
    compiled: int = 0
    seconds: float = 0.0
    failed: tuple[str, ...] = ()
    error: str = ""

    @property
    def text(self) -> str:
        """One line for the log."""
        if self.error:
            return f"kernels are compiled when they are first launched, one after another: {self.error}"
        cached = self.found - self.compiled - len(self.failed)
        line = f"{self.found} kernels: {self.compiled} compiled in {self.seconds:.1f} s, {cached} in the cache"
        return f"{line}; {len(self.failed)} did not compile: {'; '.join(self.failed)}" if self.failed else line


class KernelsAhead:
    """The kernels of a run: the compiler of this machine, or the wait for it.

    Args:
        job: Job whose kernels are compiled.
        num_processes: Processes that compile; None for one a CPU.
    """

    def __init__(self, job: Job, num_processes: int | None = None) -> None:
        self._num_processes = num_processes or default_processes()
        self._pipe: Connection | None = None
        self._process: Any = None
        self._refused = ""
        self._began: float | None = None
        if int(os.environ.get(LOCAL_RANK, "0")) > 0:
            return
        if threading.active_count() > 1:  # a lock that another thread holds would stay locked in the forked process
            self._refused = "this process has other threads, so it cannot be forked"
            return
        if current_process().daemon:
            self._refused = "this process is a daemon of multiprocessing, which may not start processes"
            return
        context = get_context("fork")
        self._pipe, given = context.Pipe()
        self._process = context.Process(target=_serve, args=(given, self._pipe, job, os.getpid()), name="kernels")
        try:
            self._process.start()
        except OSError as error:
            self._process, self._refused = None, str(error)
        given.close()
        atexit.register(self.close)  # called before multiprocessing waits for the process

    @property
    def is_wanted(self) -> bool:
        """True if the device of this job runs kernels: the same on all ranks."""
        return self._began is not None

    def begin(self, device: torch.device, rank: int) -> None:
        """Send the compiler its target, if this is a GPU; `rank` is this process's, the first of its machine's if it compiles."""
        if device.type == "cuda":
            self.begin_for(Target.present(device.index), rank)
        else:
            self.close()

    def begin_for(self, target: Target, rank: int) -> None:
        """Start compiling for a target; `rank` as for `begin`."""
        self._began = time.monotonic()
        if self._process is not None and self._pipe is not None:
            with suppress(OSError):  # the process has ended, which `finish` notices
                self._pipe.send((target, rank, int(os.environ.get(LOCAL_SIZE, "1")), self._num_processes))

    def finish(self, store: Store, rank: int, stops: Callable[[], bool], show: Callable[[int, int], None]) -> Outcome:
        """Wait until the kernels of this machine are in the cache; every process of the job calls it after `begin`.

        Args:
            store: Shared by the job's processes.
            rank: Global rank of this process.
            stops: True if the run has been asked to stop.
            show: Function of the kernels done and found, called as they change.
        """
        local = int(os.environ.get(LOCAL_RANK, "0"))
        key, end = f"{DONE}/{rank - local}", time.monotonic() + LONGEST_SECONDS
        if local > 0:
            while not store.check([key]):
                if stops() or time.monotonic() > end:
                    return Outcome(error=f"rank {rank - local} has not compiled the kernels")
                time.sleep(POLL_SECONDS)
            return Outcome(**json.loads(store.get(key)))
        outcome = Outcome(error=self._refused) if self._process is None else self._wait(stops, show, end)
        store.set(key, json.dumps(outcome._asdict()))
        self.close()
        return outcome

    def _wait(self, stops: Callable[[], bool], show: Callable[[int, int], None], end: float) -> Outcome:
        done = compiled = found = 0
        failed: list[str] = []
        assert self._pipe is not None
        while not stops() and time.monotonic() < end:
            try:
                if not self._pipe.poll(POLL_SECONDS):
                    continue
                message = self._pipe.recv()
            except (EOFError, OSError):
                self._process.join()
                return Outcome(error=f"the compiler's process ended with status {self._process.exitcode}")
            if isinstance(message, str):
                seconds = time.monotonic() - (self._began or 0.0)
                return Outcome(found, compiled, seconds, tuple(failed), message)
            found, each = message
            done += 1
            compiled += not each.cached and not each.error
            if each.error:
                failed.append(f"{each.name}: {each.error}")
            show(done, found)
        return Outcome(error="the run was asked to stop" if stops() else f"not done after {LONGEST_SECONDS:.0f} s")

    def close(self) -> None:
        """End the compiler, if it still runs."""
        atexit.unregister(self.close)
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def ranks_of_machine(job: Job, first: int, count: int) -> list[int]:
    """One rank of each group with equal budgets, of `count` ranks from `first` on."""
    budget = build_budget(job.spec, job.inventory, job.layout)
    here = range(first, min(first + count, job.spec.mesh.world_size))
    return sorted(own[0] for group in budget.ranks if (own := [rank for rank in group.ranks if rank in here]))


def _serve(pipe: Connection, others: Connection, job: Job, parent: int) -> None:
    """Body of the compiler's process: a message for each kernel, and at the end an error or an empty text."""
    others.close()
    end_with(parent)
    warnings.simplefilter("ignore")
    try:
        target, first, count, num_processes = pipe.recv()
    except EOFError:
        return  # the run does not need this result
    error = ""
    try:
        settle(cache_folder())  # entries that were compiled elsewhere and copied here
        each: tuple[int, Compiled]
        for each in compile_kernels(job, ranks_of_machine(job, first, count), target, num_processes):
            pipe.send(each)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    pipe.send(error)
    sys.stderr.flush()
