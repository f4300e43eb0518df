"""Compiles the kernels of a plan in parallel processes into Triton's cache, while the step that finds them still runs.

One process per rank finds launches (`step.find_launches`) and passes each on at once; worker processes pass them to Triton's launcher, with
a driver that claims the target (`launches.CompilingDriver`), so that a cache entry has the key with which a launch on that device looks for
it. All are forked from a process without CUDA that has imported torch and triton, which takes seconds.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from megarun.job.job import Job
from megarun.kernels.launches import KernelLaunch, build_launcher, compile_for, missing, replay, shared_key
from megarun.kernels.step import find_launches
from megarun.kernels.target import Target

MOST_PROCESSES = 32
POLL_SECONDS = 0.02
END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class Compiled(NamedTuple):
    """One kernel after its compilation.

    Attributes:
        name: Name of the kernel's function.
        seconds: Time that it took.
        cached: True if the cache had it.
        error: Reason why it is not there; empty if it is.
    """

    name: str
    seconds: float
    cached: bool
    error: str = ""


class CompileError(Exception):
    """The launches of a plan could not be found, or a process has ended."""


def default_processes() -> int:
    """One process per CPU that this process may use."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def compile_kernels(
    job: Job, ranks: Sequence[int], target: Target, num_processes: int, *, only_look: bool = False
) -> Iterator[tuple[int, Compiled]]:
    """Compile the ranks' kernels into this environment's cache; yield each finished kernel with the number of kernels found so far.

    Args:
        job: Job that megarun can build, with Triton kernels.
        ranks: Global ranks, each in a process that finds its launches.
        target: GPU for which kernels are compiled.
        num_processes: Processes that compile.
        only_look: Look each kernel up in the cache, and compile none.

    Raises:
        CompileError: A process has ended, or a step failed; compiled kernels stay in the cache.
    """
    shared_key(target)  # once, for all processes
    context = get_context("fork")
    finders = [_Finder(context, job, rank, target) for rank in ranks]
    known: set[object] = set()
    running: set[Future[Compiled]] = set()
    work = _looked_up if only_look else _compiled
    try:
        with ProcessPoolExecutor(num_processes, context, initializer=_become_worker, initargs=(target, os.getpid())) as pool:
            try:
                pool.submit(os.getpid).result()  # forks every worker now, before there are more threads
                while running or any(not finder.is_done for finder in finders):
                    for launch in _arrived(finders, POLL_SECONDS if running else None):
                        if launch.identity not in known:
                            known.add(launch.identity)
                            running.add(pool.submit(work, launch))
                    done, running = wait(running, 0, FIRST_COMPLETED) if running else (set(), running)
                    for future in done:
                        yield len(known), future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except (OSError, RuntimeError) as error:  # a broken pool, or no process could be forked
        raise CompileError(f"{type(error).__name__}: {error}") from error
    finally:
        for finder in finders:
            finder.stop()


class _Finder:
    """The process that finds a rank's launches, and its messages so far."""

    def __init__(self, context: object, job: Job, rank: int, target: Target) -> None:
        self.receives, sends = context.Pipe(duplex=False)  # type: ignore[attr-defined]
        self._rank, self.is_done = rank, False
        arguments = job, rank, target, sends, os.getpid()
        self._process: BaseProcess = context.Process(target=_find, args=arguments, daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        sends.close()

    def read(self) -> KernelLaunch | None:
        """The next launch, None after the last.

        Raises:
            CompileError: The step failed, or the process has ended.
        """
        try:
            found = self.receives.recv()
        except (EOFError, OSError):
            self._process.join()
            found = f"its process ended with status {self._process.exitcode}"
        if isinstance(found, str):
            raise CompileError(f"rank {self._rank}: {found}")
        self.is_done = found is None
        return found if isinstance(found, KernelLaunch) else None

    def stop(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.join()
        self.receives.close()


def _arrived(finders: Sequence[_Finder], timeout: float | None) -> Iterator[KernelLaunch]:
    """Launches that have been sent; without a time limit at least one message is awaited."""
    by_pipe = {finder.receives: finder for finder in finders if not finder.is_done}
    for ready in wait_for(list(by_pipe), timeout) if by_pipe else ():
        found = by_pipe[ready].read()
        if found is not None:
            yield found
    if not by_pipe and timeout:
        time.sleep(timeout)


def end_with(parent: int) -> None:
    """Let this process end when its parent does, and leave interrupts from the keyboard to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _find(job: Job, rank: int, target: Target, sends: Connection, parent: int) -> None:
    end_with(parent)
    compile_for(target)
    message: str | None = None
    try:
        find_launches(job, rank, target, sends.send)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    sends.send(message)
    sends.close()


def _become_worker(target: Target, parent: int) -> None:
    end_with(parent)
    compile_for(target)


def _compiled(launch: KernelLaunch) -> Compiled:
    return _timed(launch, replay_and_build)


def _looked_up(launch: KernelLaunch) -> Compiled:
    return Compiled(launch.kernel.name, 0.0, cached=not missing(launch))


def replay_and_build(launch: KernelLaunch) -> bool:
    """Compile a kernel and its launcher; return True if the cache had the kernel."""
    cached = not missing(launch)
    build_launcher(replay(launch))
    return cached


def _timed(launch: KernelLaunch, run: Callable[[KernelLaunch], bool]) -> Compiled:
    began = time.perf_counter()
    try:
        cached, error = run(launch), ""
    except Exception as failure:  # a compiler error concerns this kernel only, and the run's own launch reports it
        cached, error = False, f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
    return Compiled(launch.kernel.name, time.perf_counter() - began, cached, error)
