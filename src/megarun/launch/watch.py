"""Ends a job in which a rank is stuck, and names that rank; a thread of every rank.

A stopped process, a hung file system or a deadlock shows on the other ranks only as a collective that does not return, and torch blames the
rank that waits. So every rank publishes its place through the job's store. Rank 0 looks for a rank that has been in one place for longer
than its limit; the others look at rank 0. Stuck is then the rank that has never published, or publishes nothing any more; else one that
computes or reads while others wait in a collective; else the one that is furthest behind.
"""

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import render_diagnostic
from megaplan.spec.models import Mesh
from megaplan.terminal import output
from megaplan.terminal.exit_status import ERROR, SIGNAL_STATUS
from megarun.errors import place, refusal
from megarun.launch.address import here
from megarun.launch.failure import STUCK, exit_after_failure, report_failure
from megarun.launch.interrupt import Interrupt
from megarun.launch.process import ProcessIdentity, beat_key
from megarun.launch.process_group import Launch
from megarun.launch.progress import CONNECTING, Progress

BEAT_SECONDS = 2.0
SILENT_SECONDS = 10.0
STOP_SECONDS = 30.0 - SILENT_SECONDS - 4 * BEAT_SECONDS  # torchrun kills its processes 30 s after the signal; the report needs the rest
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Beat:
    """Values that a rank publishes.

    Attributes:
        number: Number of beats so far, so that no two beats are equal.
        step: Number of the step (1-based).
        place: Activity of the rank within the step.
        count: Number of places entered.
        seconds: Time since it entered the place.
        limit: Time that it may be there.
        operation: Innermost call.
        waits: True if that call waits for other ranks.
        process: The rank's process.
    """

    number: int
    step: int
    place: str
    count: int
    seconds: float
    limit: float
    operation: str
    waits: bool
    process: ProcessIdentity

    @classmethod
    def parse(cls, text: str | bytes) -> "Beat":
        """A beat from its JSON text."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "process": ProcessIdentity.parse(values["process"])})


@dataclass(frozen=True, slots=True)
class Seen:
    """The latest beat of a rank, and the time since a new one was seen."""

    beat: Beat
    silent: float

    def is_overdue(self, silent_limit: float) -> bool:
        """True if the rank exceeds the time limit of its place, or publishes nothing.

        The latest beat of a rank that publishes nothing may be of the first step, whose limit is long.

        Args:
            silent_limit: Time in seconds that a rank may be without a beat, whatever it does.
        """
        return self.beat.seconds + self.silent > self.beat.limit or self.silent > silent_limit


def stuck_ranks(seen: Mapping[int, Seen], silent_seconds: float = SILENT_SECONDS) -> list[int]:
    """The ranks that the others wait for, given that one is overdue.

    Args:
        seen: The latest beat of every rank.
        silent_seconds: Time without a beat after which a process counts as stopped.
    """
    silent = [rank for rank, each in seen.items() if each.silent > silent_seconds]
    if silent:
        return sorted(silent)
    busy = {rank: each for rank, each in seen.items() if not each.beat.waits} or dict(seen)
    last = min((each.beat.step, each.beat.count) for each in busy.values())
    return sorted(rank for rank, each in busy.items() if (each.beat.step, each.beat.count) == last)


class Watch:
    """Watches the ranks of a job while it is entered.

    Args:
        launch: Launch of this rank, with the store.
        mesh: Mesh of the plan, for coordinates.
        progress: Progress of this rank.
        interrupt: Signals of this rank.
        beat_seconds: Time between two beats.
        silent_seconds: Time without a beat after which a process counts as stopped.
    """

    def __init__(
        self,
        launch: Launch,
        mesh: Mesh,
        progress: Progress,
        interrupt: Interrupt,
        beat_seconds: float = BEAT_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        # a separate connection: the main thread's is busy while it waits for another rank
        self._launch = replace(launch, store=launch.store.clone()) if launch.world_size > 1 else launch  # type: ignore[attr-defined]
        self._mesh, self._progress, self._interrupt = mesh, progress, interrupt
        self._every, self._silent = beat_seconds, silent_seconds
        self._process, self._number = ProcessIdentity.own(), 0
        self._latest: dict[int, tuple[Beat, float]] = {}
        self._stop_asked: tuple[float, int] | None = None
        self._turn = time.monotonic()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=target, name="watch", daemon=True) for target in (self._run, self._guard)]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(self._every + 1)

    def _run(self) -> None:
        try:
            self._publish()  # the first heartbeat is sent at once: a rank that is stuck before the second must be detected, too
            while not self._over.wait(self._every):
                self._publish()
                self._turn = time.monotonic()
                seen = self._look(range(self._launch.world_size) if self._launch.rank == 0 else (0,))
                if self._must_stop():
                    self._end(SIGNAL_STATUS + self._interrupt.signalled)
                elif any(each.is_overdue(max(self._silent, self._progress.step_timeout)) for each in seen.values()):
                    self._end(ERROR)
        except RuntimeError:  # the store is closed: the process that hosted it has ended, which every rank notices
            self._turn = float("inf")

    def _guard(self) -> None:
        """End this rank if the store does not answer, because the rank that keeps it is stuck."""
        while not self._over.wait(self._every):
            if time.monotonic() - self._turn > self._progress.limit + self._silent:
                detail = f"the store of the job, which rank 0 or torchrun keeps, does not answer\nthis rank: {self._here(self._own())}"
                found = diagnostic("MP660", detail)
                output.note([f"{place(self._launch.rank, self._mesh)} noticed:", "", render_diagnostic(found)])
                os._exit(ERROR)

    def _own(self) -> Beat:
        progress = self._progress
        operation, waits = progress.operation()
        where = progress.step, progress.place, progress.count, progress.seconds_here, progress.limit
        return Beat(self._number, *where, operation, waits, self._process)

    def _publish(self) -> None:
        self._number += 1
        self._launch.store.set(beat_key(self._launch.rank), json.dumps(asdict(self._own())))

    def _look(self, ranks: Any) -> dict[int, Seen]:
        """The latest beats of the ranks that have published one."""
        now = time.monotonic()
        keys = [beat_key(rank) for rank in ranks]
        present = keys if self._launch.store.check(keys) else [key for key in keys if self._launch.store.check([key])]
        for key, text in zip(present, self._launch.store.multi_get(present) if present else (), strict=True):
            rank, beat = int(key.rpartition("/")[2]), Beat.parse(text)
            if rank not in self._latest or self._latest[rank][0].number != beat.number:
                self._latest[rank] = beat, now
        return {rank: Seen(beat, now - at) for rank, (beat, at) in self._latest.items() if beat_key(rank) in present}

    def _must_stop(self) -> bool:
        """True if a signal asked this rank to stop, and it has stayed in one place for longer than a healthy step does."""
        if not self._interrupt.signalled:
            return False
        now, count = time.monotonic(), self._progress.count
        if self._stop_asked is None or self._stop_asked[1] != count:
            self._stop_asked = now, count
        limit = max(STOP_SECONDS, self._progress.stop_limit) if self._progress.place != "saving" else self._progress.limit
        return now - self._stop_asked[0] > limit

    def _end(self, status: int) -> None:
        """Report the stuck ranks once for the job, and end this process."""
        self._turn = time.monotonic() + 3 * self._silent  # the store has just answered; the next steps take a while
        if self._launch.world_size > 1:  # the heartbeats show only after a while which ranks are alive
            self._look(range(self._launch.world_size))
            end = time.monotonic() + self._silent + self._every
            while time.monotonic() < end and not self._over.wait(self._every):
                self._publish()
                self._look(range(self._launch.world_size))
            if self._over.is_set():
                return
        else:
            self._look((0,))
        seen = self._look(range(self._launch.world_size))
        unseen = [rank for rank in range(self._launch.world_size) if rank not in seen]
        stuck = unseen or stuck_ranks(seen, self._silent)
        if self._launch.rank in stuck and len(stuck) < len(seen) and self._launch.rank != 0:
            return  # another rank reports it
        self._launch.store.set(STUCK, json.dumps([asdict(seen[rank].beat.process) for rank in stuck if rank in seen]))
        report_failure(refusal("MP660", self._account(seen, stuck)), self._launch, self._mesh, noticed=True)
        exit_after_failure(self._launch.store, status)

    def _account(self, seen: Mapping[int, Seen], stuck: list[int]) -> str:
        lines = []
        for rank in stuck[:MOST_NAMED]:
            if rank not in seen:
                lines.append(f"{place(rank, self._mesh)}: no sign of life since the start")
                continue
            each = seen[rank]
            since = f"no sign of life for {each.silent:.0f} s" if each.silent > self._silent else f"{each.beat.seconds:.0f} s there"
            where = f"{place(rank, self._mesh)} on {each.beat.process.host}, process {each.beat.process.pid}"
            lines += [f"{where}: {since}", f"  {self._here(each.beat)}"]
        if len(stuck) > MOST_NAMED:
            lines.append(f"and {len(stuck) - MOST_NAMED} more")
        if any(rank in seen and seen[rank].beat.place == CONNECTING for rank in stuck):
            lines.append(f"this rank: {here()}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface that connects the machines")
        others = [rank for rank in seen if rank not in stuck]
        if others:
            first = others[0]
            lines.append(f"{place(first, self._mesh)}{f' and {len(others) - 1} more' if len(others) > 1 else ''}, waiting for it:")
            lines.append(f"  {self._here(seen[first].beat)}")
        return "\n".join(lines)

    @staticmethod
    def _here(beat: Beat) -> str:
        return f"step {beat.step}, {beat.place}: {beat.operation}"
