"""A limit of a command's processor time: an input of absurd size ends with an error instead of an hour later."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

VARIABLE = "MEGAPLAN_CPU_SECONDS"
DEFAULT_SECONDS = 10.0
"""An estimate takes hundredths of a second, a report of a thousand ranks one or two."""
AGAIN_SECONDS = 0.2
"""The exception is lost where Python calls code that cannot raise, such as a destructor: it is raised again."""


class ProcessorTimeError(BaseException):
    """The command has used its processor time. No `Exception`, so that nothing that tries again handles it.

    Attributes:
        seconds: The limit.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:g} s")
        self.seconds = seconds


def processor_seconds() -> float:
    """The limit in seconds: of the environment, else the default; 0 for none."""
    given = os.environ.get(VARIABLE, "")
    try:
        found = float(given)
    except ValueError:
        return DEFAULT_SECONDS
    return found if 0 <= found < float("inf") else DEFAULT_SECONDS


@contextmanager
def limited_processor_time(seconds: float) -> Iterator[None]:
    """Raise `ProcessorTimeError` after so many seconds of processor time; 0: never, and so in a thread or where a timer runs already."""
    if not seconds or threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(_: int, __: FrameType | None) -> None:
        raise ProcessorTimeError(seconds)

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
