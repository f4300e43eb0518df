"""`python -m megarun`, alone or under torchrun."""

import faulthandler
import os
import signal
import sys
from types import FrameType

SIGNAL_STATUS = 128


def end(number: int, _: FrameType | None) -> None:
    """End at once: before training handles signals there is nothing to save, and an import may drop an exception."""
    os._exit(SIGNAL_STATUS + number)


def main() -> None:
    """Run the command of the process and exit."""
    # set before the imports, which take seconds; `nohup` ignores SIGHUP and `&` ignores SIGINT; training handles SIGINT again
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    if sys.stderr is not None:
        faulthandler.enable()  # print the place of a SIGBUS or SIGSEGV, in libraries or on a failing disk
    from megaplan.terminal.streams import occupy_standard_descriptors  # noqa: PLC0415
    from megarun.cli.main import run  # noqa: PLC0415
    from megarun.launch.failure import exit_process  # noqa: PLC0415

    occupy_standard_descriptors()
    exit_process(run())


if __name__ == "__main__":
    main()
