"""metrics.jsonl: one object per step, and one per decision about a bad step, written by rank 0.

A line that cannot be written never ends a run: it is kept until it can be written, with one message. The file is made again if it is
removed meanwhile, in the folder that the run began with and in no other.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from os import SEEK_END
from pathlib import Path
from types import TracebackType

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, Severity
from megaplan.terminal.output import report
from megarun.errors import refusal
from megarun.files import open_own, open_regular
from megarun.metrics.curves import Curves
from megarun.metrics.records import Decision, Evaluated, RankMemory, RankTimes, StepMetrics

FILE_NAME = "metrics.jsonl"
BLOCK_BYTES = 1 << 16
MOST_WAITING = 20_000
"""Lines that wait to be written, some 10 MB; of more the oldest are lost."""
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class MetricsFile:
    """Appends lines to metrics.jsonl; ranks other than 0 write nothing.

    The file must be new or without a line unless the run is resumed: a job that is killed before its first step has made nothing.
    """

    def __init__(self, folder: Path, rank: int, *, resumed: bool = False, curves: Sequence[Callable[[Path], Curves]] = ()) -> None:
        """`curves` make further writers of the numbers in the folder."""
        self._path, self._writes, self._resumed, self._makes = folder / FILE_NAME, rank == 0, resumed, curves
        self._folder = self._handle = -1
        self._waiting: deque[bytes] = deque()
        self._num_lost, self._reported = 0, False
        self._curves: list[Curves] = []

    def __enter__(self) -> "MetricsFile":
        if self._writes:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                continues = self._resumed or _has_no_line(self._path)
                if continues:
                    _drop_cut_line(self._path)
                with open_own(self._path, os.O_APPEND if continues else os.O_APPEND | os.O_EXCL) as file:
                    self._handle = os.dup(file.fileno())
                self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileExistsError:
                hint = f"--out {self._path.parent}-2"
                raise refusal("MP608", f"{self._path} exists", hints=(hint,), file=str(self._path.parent)) from None
            except OSError as error:
                raise refusal("MP670", f"{self._path}: {error.strerror}", file=str(self._path)) from None
            self._curves = [make(self._path.parent) for make in self._makes]
        return self

    def write(self, metrics: StepMetrics | Evaluated | Decision | RankMemory | RankTimes) -> None:
        """Append a line and give it to the system. A line that it does not take waits for the next call."""
        if self._handle < 0:
            return
        line = asdict(metrics)
        self._waiting.append(json.dumps(line).encode() + b"\n")
        self._deliver()
        for each in self._curves:
            each.write(line)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._handle >= 0:
            if self._waiting:
                self._deliver()
            if lost := self._num_lost + len(self._waiting):
                self._warn(f"{lost:,} lines were lost")
            for handle in (self._handle, self._folder):
                with suppress(OSError):  # a network file system reports at the end that it could not write
                    os.close(handle)
            self._handle = self._folder = -1
        for each in self._curves:
            each.close()

    def _deliver(self) -> None:
        try:
            self._make_again_if_removed()
            while self._waiting:
                line = self._waiting[0]
                rest = line[os.write(self._handle, line) :]
                if rest:
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
        except OSError as error:
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[1]  # the first line may have been written only partly
                self._num_lost += 1
            if not self._reported:
                self._reported = True
                self._warn(f"{error.strerror or error}; the run continues, and its lines are written when they can be")
            with suppress(OSError):  # a stale handle of a network file system stays stale
                self._open_again()

    def _make_again_if_removed(self) -> None:
        """Open the file again if another file, or none, has its name; one that was removed is written again from its first line.

        Raises:
            OSError: It cannot be made.
        """
        ours = os.fstat(self._handle)
        try:
            named = os.stat(FILE_NAME, dir_fd=self._folder, follow_symlinks=False)
            if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino):
                return
        except FileNotFoundError:
            pass
        before = os.dup(self._handle)
        try:
            self._open_again()
            if ours.st_nlink == 0 and os.fstat(self._handle).st_size == 0:
                position = 0
                while block := os.pread(before, BLOCK_BYTES, position):
                    position += os.write(self._handle, block)
                self._warn("it was removed while the run wrote it; it is made again with all its lines")
            else:
                self._warn("it was moved while the run wrote it; the lines that follow are in a new file")
        finally:
            os.close(before)

    def _open_again(self) -> None:
        handle = os.open(FILE_NAME, FLAGS, 0o666, dir_fd=self._folder)  # opened in the run's folder, even if the folder was renamed
        os.dup2(handle, self._handle, inheritable=False)
        os.close(handle)

    def _warn(self, detail: str) -> None:
        report([diagnostic("MP661", f"{self._path}: {detail}", Location(file=str(self._path)), severity=Severity.WARNING)])


def _has_no_line(path: Path) -> bool:
    """True if the file exists without a complete line."""
    try:
        with open_regular(path) as file:
            return b"\n" not in file.read(BLOCK_BYTES)
    except OSError:
        return False


def _drop_cut_line(path: Path) -> None:
    """Cut off a last line without an end, which a killed process or a full disk has left: the next line would continue it."""
    if not path.is_file():
        return
    with open_own(path, 0) as file:
        size = file.seek(0, SEEK_END)
        handle = file.fileno()
        while size:
            start = max(0, size - BLOCK_BYTES)
            end = os.pread(handle, size - start, start).rfind(b"\n")
            if end >= 0:
                size = start + end + 1
                break
            size = start
        file.truncate(size)
