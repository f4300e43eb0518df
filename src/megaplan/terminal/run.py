"""Runs a command and returns its exit status: the common handling of a closed pipe, an interrupt and every other exception."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from megaplan.diagnostics import diagnostic, refuse
from megaplan.terminal import output
from megaplan.terminal.exit_status import BROKEN_PIPE, ERROR, INTERRUPTED
from megaplan.terminal.streams import unfailing_stderr

VARIABLE = "MEGAPLAN_CPU_SECONDS"
DEFAULT_SECONDS = 10.0
"""Processor seconds that a command may take by default: an estimate takes hundredths of a second, a report of a thousand ranks takes one
or two seconds.
"""
AGAIN_SECONDS = 0.2
"""Seconds until the exception is raised again: it is lost if Python is in code that cannot raise, such as a destructor."""


class ProcessorTimeError(BaseException):
    """The command has used its processor time. Not an `Exception`, so that no retry catches it.

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
    """Raise `ProcessorTimeError` after so many seconds of processor time; 0: never; also never in a thread or if a timer already runs."""
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


def exit_status_of(command: Callable[[], object], failed: Callable[[Exception], int]) -> int:
    """Run a command.

    Args:
        command: Function that returns its exit status; any other value means 0.
        failed: Function that reports an exception and gives its status.

    Returns:
        The exit status; 141 if the reader of stdout has closed it, 2 if stdout cannot be written for another reason or the working
        directory no longer exists (MP675), 130 if the command was interrupted.
    """
    with unfailing_stderr():
        try:
            _require_working_directory()
            status = command()
            output.flush()
        except (BrokenPipeError, output.OutputError) as error:
            # The reader of a pipe has closed it (`| head`), or the disk is full: the interpreter must not flush into it either.
            if sys.stdout is not None:
                with suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError) or error.is_pipe:
                return BROKEN_PIPE
            output.report([diagnostic("MP482", f"stdout: {error.reason}", hints=("... > FILE    # on a disk with free space",))])
            return ERROR
        except KeyboardInterrupt:
            return INTERRUPTED
        except ProcessorTimeError as error:
            detail = f"{error.seconds:g} s of processor time"
            output.report([diagnostic("MP494", detail, hints=(f"{VARIABLE}={12 * error.seconds:g} before the command",))])
            return ERROR
        except Exception as error:  # last resort: an exception that no command handles is reported, and no result is printed
            return failed(error)
    return status if isinstance(status, int) else 0


def _require_working_directory() -> None:
    """Refuse to run in a folder that no longer exists: relative paths have no meaning, and libraries that look for it end the process.

    Raises:
        MegaplanError: MP675.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise refuse("MP675", f"{os.environ.get('PWD', 'the working directory')}: {error.strerror}", "cd ~") from None
