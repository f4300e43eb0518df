"""Runs a command and returns its exit status: the common handling of a closed pipe, an interrupt and every other exception."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from megaplan.diagnostics import diagnostic
from megaplan.terminal import output
from megaplan.terminal.exit_status import BROKEN_PIPE, ERROR, INTERRUPTED
from megaplan.terminal.processor_time import VARIABLE, ProcessorTimeError
from megaplan.terminal.streams import unfailing_stderr


def exit_status_of(command: Callable[[], object], failed: Callable[[Exception], int]) -> int:
    """Run a command.

    Args:
        command: Function that returns its exit status; any other value means 0.
        failed: Function that reports an exception and gives its status.

    Returns:
        The exit status; 141 if the reader of stdout has closed it, 2 if stdout cannot be written for another reason, 130 if the command
        was interrupted.
    """
    with unfailing_stderr():
        try:
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
        except Exception as error:  # last resort: an exception that no command handles is reported, and never becomes an answer
            return failed(error)
    return status if isinstance(status, int) else 0
