"""SIGTERM and SIGINT, received by any rank, stop all ranks after the same step."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, group: dist.ProcessGroup) -> int:
        """The signal that any rank has received, 0 if none. Collective."""
        return largest([self.received], group)[0]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = max(self.received, number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
