"""Console output of training: a progress line on a terminal, periodic lines otherwise, and a table at the end."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megaplan.foreign import one_line, printable
from megaplan.terminal.output import encodable, note
from megaplan.terminal.streams import UnfailingStream
from megaplan.units import format_bytes
from megarun.metrics.records import Evaluated, StepMetrics

LINES_OFF_TERMINAL = 10
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two printed steps without a terminal, so that the log of a long run shows progress."""


@contextmanager
def progress_line(text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr if that is a terminal; yields a function of the finished and the known total work."""
    columns = TextColumn(text), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_live()) as progress:
        task = progress.add_task(text)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def is_live() -> bool:
    """True if stderr is a terminal that moves its cursor."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Display:
    """Progress on stderr, on rank 0 only."""

    def __init__(self, num_steps: int, rank: int) -> None:
        self._num_steps, self._speaks = num_steps, rank == 0
        self._live = self._speaks and is_live()
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self._live)
        self._task = self._progress.add_task("train", total=num_steps, text="")
        self._printed = time.monotonic()

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def note(self, text: str | None, *, anywhere: bool = False) -> None:
        """Print a message, if there is one; `anywhere` is true to print it on every rank."""
        if (self._speaks or anywhere) and text is not None:
            self._progress.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def show_kernels(self, done: int, found: int) -> None:
        """Show how many of the kernels found so far are compiled; off a terminal only that it begins."""
        self._progress.update(self._task, text=f"kernels compiled: {done} of {found}")
        if self._speaks and not self._live and done == 1:
            sys.stderr.write("compiling kernels\n")

    def show(self, metrics: StepMetrics) -> None:
        """Show the metrics of a step."""
        text = step_text(metrics)
        self._progress.update(self._task, completed=metrics.step, text=text)
        if self._speaks and not self._live and self._is_due(metrics.step):
            self._printed = time.monotonic()
            sys.stderr.write(f"step {metrics.step}/{self._num_steps}  {text}\n")

    def _is_due(self, step: int) -> bool:
        every = max(1, self._num_steps // LINES_OFF_TERMINAL)
        return step % every == 0 or step in (1, self._num_steps) or time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES

    def show_evaluation(self, evaluated: Evaluated) -> None:
        """Print the held-out loss on a separate line."""
        if self._speaks:
            bits = f"{evaluated.evaluation_bits_per_byte:.4f} bits per byte"
            self._progress.console.print(f"step {evaluated.step}/{self._num_steps}  held-out loss {evaluated.evaluation_loss:.4f}  {bits}")


def step_text(metrics: StepMetrics) -> str:
    """`loss 2.3456  12,345 tokens/s  MFU 41.2 %  lr 3.00e-04  gradient norm 0.92  61.20 GiB`; MFU on CUDA alone."""
    mfu = "" if metrics.mfu is None else f"  MFU {100 * metrics.mfu:.1f} %"
    rate = f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s{mfu}"
    return f"{rate}  lr {metrics.learning_rate:.2e}  gradient norm {metrics.grad_norm:.3g}  {format_bytes(metrics.allocated_bytes)}"


def print_summary(title: str, history: Sequence[StepMetrics], metrics_path: str) -> None:
    """Print the final table on stdout: first and last loss, throughput without the first step, memory, time.

    Text that stdout does not accept is reported on stderr; the run is over, and its status does not change.
    """
    stdout: Any = UnfailingStream(sys.stdout, "stdout")
    first, last = history[0], history[-1]
    timed = sorted(metrics.tokens_per_second for metrics in (history[1:] or history))
    largest = max(history, key=lambda metrics: metrics.allocated_bytes)
    table = Table(title=escape(one_line(title)), show_header=False)
    table.add_row("steps", f"{len(history):,}")
    table.add_row("loss, first and last", encodable(f"{first.loss:.4f} → {last.loss:.4f} nats per token", stdout))
    table.add_row("throughput, median", f"{timed[len(timed) // 2]:,.0f} tokens/s")
    what = "peak" if largest.allocated_basis == "peak" else "parameters and optimizer state"
    table.add_row("memory, largest rank", f"{format_bytes(largest.allocated_bytes)} ({what})")
    table.add_row("time in steps", f"{sum(metrics.step_seconds for metrics in history):,.1f} s")
    table.add_row("metrics", escape(one_line(metrics_path)))
    Console(file=stdout).print(table)
    if account := stdout.account:
        note([account])
