"""From a command to an exit status: what megaplan and megarun do alike with a closed pipe, an interrupt and everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from megaplan.terminal.exit_status import BROKEN_PIPE, INTERRUPTED


def exit_status_of(command: Callable[[], object], failed: Callable[[Exception], int]) -> int:
    """Run a command.

    Args:
        command: Returns its exit status; anything else is 0.
        failed: The status of an exception, after it has been reported.

    Returns:
        The exit status; 141 if the reader of stdout has gone, 130 if the command was interrupted.
    """
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`| head`): say nothing, and keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the last resort: what no command handles is reported, and never an answer
        return failed(error)
    return status if isinstance(status, int) else 0
