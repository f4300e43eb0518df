"""metrics.jsonl: one object per step, and one per decision about a bad step, written by rank 0."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from os import SEEK_END
from pathlib import Path
from types import TracebackType
from typing import TextIO

from megarun.errors import refusal
from megarun.metrics.records import Decision, Evaluated, RankMemory, RankTimes, StepMetrics
from megarun.metrics.tensorboard import Board

FILE_NAME = "metrics.jsonl"
BLOCK_BYTES = 1 << 16


class MetricsFile:
    """Appends lines to metrics.jsonl, which must be new unless the run is resumed; ranks other than 0 write nothing."""

    def __init__(self, folder: Path, rank: int, *, resumed: bool = False, tensorboard: bool = False) -> None:
        self._path, self._writes, self._resumed, self._shows = folder / FILE_NAME, rank == 0, resumed, tensorboard
        self._file: TextIO | None = None
        self._board: Board | None = None

    def __enter__(self) -> MetricsFile:
        if self._writes:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                if self._resumed:
                    _drop_cut_line(self._path)
                self._file = self._path.open("a" if self._resumed else "x", encoding="utf-8")
            except FileExistsError:
                hint = f"--out {self._path.parent}-2"
                raise refusal("MP608", f"{self._path} exists", hints=(hint,), file=str(self._path.parent)) from None
            except OSError as error:
                raise refusal("MP608", f"{self._path}: {error.strerror}", file=str(self._path.parent)) from None
            if self._shows:
                self._board = Board(self._path.parent)
        return self

    def write(self, metrics: StepMetrics | Evaluated | Decision | RankMemory | RankTimes) -> None:
        """Append a line and flush it to disk.

        Raises:
            MegaplanError: MP661, for example if the disk is full.
        """
        if self._file is not None:
            line = asdict(metrics)
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
                if self._board is not None:
                    self._board.write(line)
            except OSError as error:
                raise refusal("MP661", f"{self._path}: {error.strerror or error}", file=str(self._path)) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._file is not None:
            with suppress(OSError):  # a line that could not be written is reported already
                self._file.close()
        if self._board is not None:
            self._board.close()


def _drop_cut_line(path: Path) -> None:
    """Cut off a last line without an end, which a killed process or a full disk has left: the next line would continue it."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        size = file.seek(0, SEEK_END)
        while size:
            start = max(0, size - BLOCK_BYTES)
            file.seek(start)
            end = file.read(size - start).rfind(b"\n")
            if end >= 0:
                size = start + end + 1
                break
            size = start
        file.truncate(size)
