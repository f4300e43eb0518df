"""Two computations of one rank that take turns: while rows of one are in transit, the other computes.

Exactly one of the two runs at any time, and the turn passes only when one waits for an exchange (`hand_over`) or ends. So the order of all
operations, of collectives and of allocations follows from the two computations alone, never from the timing of threads.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, Thread

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_running: "list[Turns]" = []
"""The pair that runs, if any; also visible to autograd's device threads."""


def takes_turns() -> bool:
    """True while both computations of a pair are unfinished."""
    return bool(_running) and not any(_running[-1].ended)


def hand_over() -> None:
    """Let the other computation of the pair run until its turn ends; call it after the start of an exchange."""
    if _running:
        _running[-1].hand_over()


class _AbandonedError(Exception):
    """The other computation failed, and this one is not continued."""


class Turns:
    """A pair: the first computation runs in the caller's thread, the second in another thread.

    Attributes:
        ended: True for each computation that has ended.
    """

    def __init__(self, first: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
        """`device` is that of both computations, whose current stream both use."""
        self._work, self._device = (first, second), device
        self.ended = [False, False]
        self._turn, self._errors = 0, list[BaseException]()
        self._changed = Condition()

    def run(self) -> None:
        """Run both to their ends."""
        thread = Thread(target=self._second, args=(_thread_state(self._device),), name="second of a pair")
        _running.append(self)
        try:
            thread.start()
            self._part(0)
            thread.join()
        finally:
            _running.remove(self)
        if self._errors:
            raise self._errors[0]

    def hand_over(self) -> None:
        """Pass the turn, and wait for it; the caller is the computation whose turn it is, whichever of its threads calls."""
        with self._changed:
            mine = self._turn
            if self.ended[1 - mine]:
                return
            self._turn = 1 - mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == mine)
            if self._errors:
                raise _AbandonedError

    def _second(self, state: Callable[[], ExitStack]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == 1)
        with state():
            self._part(1)

    def _part(self, index: int) -> None:
        try:
            if not self._errors:
                self._work[index]()
        except _AbandonedError:
            pass
        except BaseException as error:  # `run` raises it in the caller's thread
            self._errors.append(error)
        with self._changed:
            self.ended[index] = True
            self._turn = 1 - index
            self._changed.notify_all()


def _thread_state(device: torch.device) -> Callable[[], ExitStack]:
    """A function that gives another thread this one's stream and dispatch modes, as autograd gives its own threads."""
    modes = _get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def entered() -> ExitStack:
        stack = ExitStack()
        if stream is not None:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(stream))
        for mode in modes:
            stack.enter_context(_pushed(mode))
        return stack

    return entered


@contextmanager
def _pushed(mode: torch.utils._python_dispatch.TorchDispatchMode) -> Iterator[None]:
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()
