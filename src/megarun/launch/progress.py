"""Progress of a rank's main thread: written by it, and read by the thread that watches it."""

import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

INNERMOST_FRAMES = 4
LARGEST_FACTOR = 5.0
CONNECTING = "connecting"
"""The place (a stage of the main thread) in which ranks connect to each other, with its own limit."""
LONG_PLACES = frozenset({"starting", "evaluating", "saving"})
"""Places whose time does not depend on the size of a step, which have the time limit of the first step."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of a rank in one place of a step, in seconds.

    Attributes:
        first_step: Time limit of the first step, which compiles and connects, and of evaluations and saves.
        step: Time limit after the first step; at least five times the longest time that the rank has spent in one place of a step.
    """

    first_step: float = 1800.0
    step: float = 300.0


class Progress:
    """The step and place of a rank. Only the main thread calls `enter`.

    Attributes:
        step: Number of the step (1-based); 0 before the first.
        place: Activity of the rank within the step.
        count: Number of places entered: a rank is behind another if it has entered fewer.
        seconds: Total time in each place since the first step ended.
    """

    def __init__(self, timeouts: Timeouts | None = None, connecting: float | None = None) -> None:
        self._timeouts, self._connecting = timeouts or Timeouts(), connecting
        self.step, self.place, self.count = 0, "starting", 0
        self.seconds: dict[str, float] = {}
        self._first: int | None = None
        self._since, self._longest = time.monotonic(), 0.0
        self._thread = threading.get_ident()

    def enter(self, place: str, step: int | None = None) -> None:
        """Note that the main thread begins to do something else."""
        now = time.monotonic()
        if self.is_steady:
            spent = now - self._since
            self.seconds[self.place] = self.seconds.get(self.place, 0.0) + spent
            if self.place not in LONG_PLACES:
                self._longest = max(self._longest, spent)
        if step is not None:
            self.step = step
            if self._first is None:
                self._first = step
        self.place, self._since = place, now
        self.count += 1

    @property
    def is_steady(self) -> bool:
        """True if the first step of this start has ended."""
        return self._first is not None and self.step > self._first

    @property
    def seconds_here(self) -> float:
        """Time since the rank entered its place."""
        return time.monotonic() - self._since

    @property
    def limit(self) -> float:
        """Time limit of the rank in its current place."""
        if self.place == CONNECTING and self._connecting is not None:
            return self._connecting
        if not self.is_steady or self.place in LONG_PLACES:
            return max(self._timeouts.first_step, self._timeouts.step)
        return max(self._timeouts.step, LARGEST_FACTOR * self._longest)

    @property
    def step_timeout(self) -> float:
        """The given time limit of a place in a step."""
        return self._timeouts.step

    @property
    def stop_limit(self) -> float:
        """Longest time of a place in a healthy step of this run so far."""
        return LARGEST_FACTOR * self._longest

    def operation(self) -> tuple[str, bool]:
        """`file:line function` of the innermost call of megarun or torch, and whether it waits for other ranks in a collective."""
        frame = sys._current_frames().get(self._thread)
        return ("unknown", False) if frame is None else described(frame)


def described(frame: FrameType) -> tuple[str, bool]:
    """See `Progress.operation`.

    A rank waits for others if its innermost Python code is torch's and one of the innermost frames is of torch.distributed: below it is the
    C++ code of a collective. A hook that FSDP or a pipeline calls is no such frame.
    """
    innermost: list[FrameType] = []
    found: FrameType | None = frame
    while found is not None and len(innermost) < INNERMOST_FRAMES:
        innermost.append(found)
        found = found.f_back
    names = [each.f_code.co_filename.replace("\\", "/") for each in innermost]
    waits = "/torch/" in names[0] and any("/torch/distributed/" in name for name in names)
    own: FrameType | None = frame
    while own is not None and "/megarun/" not in own.f_code.co_filename.replace("\\", "/"):
        own = own.f_back
    shown = [_text(frame)] if own is None or own is frame else [_text(own), _text(frame)]
    return ", in ".join(shown), waits


def _text(frame: FrameType) -> str:
    path = frame.f_code.co_filename.replace("\\", "/")
    for package in ("/megarun/", "/torch/"):
        if package in path:
            path = package.strip("/") + "/" + path.rpartition(package)[2]
            break
    else:
        path = path.rpartition("/")[2]
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
