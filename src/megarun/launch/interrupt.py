"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP, received by any rank, stop all ranks after the same step.

Schedulers send SIGUSR1 or SIGHUP some time before they end a job.
"""

import os
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

ALWAYS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*ALWAYS, signal.SIGUSR1, signal.SIGHUP)


def largest(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The maximum of each value over the ranks of a gloo group, without a device synchronisation. Collective."""
    found = torch.tensor(values)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in found]


class Interrupt:
    """Records a signal instead of ending the process; a second SIGINT ends it as usual.

    torchrun forwards its signal to the workers of its machine and kills them 30 s later; other machines receive it through `agreed`.

    Attributes:
        received: Signal number that this rank has received; 0 if none.
    """

    def __init__(self) -> None:
        self.received, self._before = 0, {}  # type: ignore[var-annotated]
        self._signalled, self._pipe, self._wakeup = 0, (-1, -1), -1

    def __enter__(self) -> "Interrupt":
        self._pipe = os.pipe()
        for handle in self._pipe:
            os.set_blocking(handle, False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # `nohup` ignores SIGHUP for its command, and an ignored signal stays ignored
        noted = [number for number in SIGNALS if number in ALWAYS or signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in noted}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        for handle in self._pipe:
            os.close(handle)
        self._pipe = (-1, -1)

    @property
    def signalled(self) -> int:
        """The signal that this process has received, also while its main thread is in C++ code and `received` is not set yet; 0 if none.

        Any thread may ask.
        """
        try:
            found = os.read(self._pipe[0], 4096)
        except OSError:
            return self._signalled
        self._signalled = max([self._signalled, *(number for number in found if number in SIGNALS)])
        return self._signalled

    def agreed(self, group: dist.ProcessGroup) -> int:
        """The signal that any rank has received, 0 if none. Collective."""
        return largest([self.received], group)[0]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = max(self.received, number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
