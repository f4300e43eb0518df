"""Runs a command and returns its exit status: the common handling of a closed pipe, an interrupt and every other exception."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from megaplan.terminal.exit_status import BROKEN_PIPE, INTERRUPTED


def exit_status_of(command: Callable[[], object], failed: Callable[[Exception], int]) -> int:
    """Run a command.

    Args:
        command: Function that returns its exit status; any other value means 0.
        failed: Function that reports an exception and gives its status.

    Returns:
        The exit status; 141 if the reader of stdout has closed it, 130 if the command was interrupted.
    """
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`): print nothing, and keep the interpreter from flushing into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # last resort: an exception that no command handles is reported, and never becomes an answer
        return failed(error)
    return status if isinstance(status, int) else 0
