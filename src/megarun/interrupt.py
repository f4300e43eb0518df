"""SIGTERM and SIGINT: every rank stops after the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Notes the first signal instead of ending the process; a second SIGINT ends it as always.

    torchrun passes its own signal to the workers of its machine and kills them 30 s later; other machines learn of it here.
    """

    def __init__(self) -> None:
        self._received, self._before = 0, {}  # type: ignore[var-annotated]

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, group: dist.ProcessGroup) -> int:
        """The signal that any rank has received, 0 if none; collective on a gloo group, so that no device waits."""
        found = torch.tensor(self._received)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return int(found)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received = max(self._received, number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
