"""Strikes at the inside of a save or of an evaluation: in this process, or, run under torchrun, in one rank of several.

torchrun … fault_aim.py PLACE STRIKE RANK FOLDER WORDS…

Each rank leaves its number of updates in FOLDER, and the one that strikes an empty file.
"""

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarun.checkpoint import save
from megarun.checkpoint.keeper import Keeper
from megarun.checkpoint.storage import CheckpointWriter
from megarun.engine.trainer import Trainer
from megarun.parallel.apply.forward import ForwardRunner
from megarun.remote import RemotePath

SECOND = 2
STRUCK = "struck"
PLACES: dict[str, tuple[Any, str]] = {
    "the copy of a save": (save, "whole_state"),
    "the writing of a save": (CheckpointWriter, "write_data"),
    "the commit of a save": (CheckpointWriter, "finish"),
    "the removal of old checkpoints": (CheckpointWriter, "_remove_outdated"),
    "an upload": (RemotePath, "upload"),
    "an evaluation": (ForwardRunner, "loss"),
    "the building of stages": (Trainer, "__init__"),
    "a step": (Trainer, "measure"),
    "an update": (Trainer, "update"),
    "the loading of a checkpoint": (Keeper, "_load"),
    "a compilation": ("torch._inductor.compile_fx", "compile_fx"),
}


@dataclass(frozen=True)
class SelfKill:
    """A kill of a rank by itself.

    Attributes:
        place: Name in `PLACES`.
        times: Entries of the place, the last of which ends the rank.
        seconds: Seconds from that entry to the kill; the rank continues meanwhile.
        struck: File that the rank leaves at that entry.
    """

    place: str
    times: int
    seconds: float
    struck: Path

    def strike(self) -> None:
        """End this process after the seconds."""
        self.struck.touch()
        threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def full_disk() -> None:
    """Error that a write meets there."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sending(number: int, process: int) -> Callable[[], None]:
    """A strike: the signal, and the place lasts long enough to receive it."""

    def strike() -> None:
        os.kill(process, number)
        time.sleep(0.5)

    return strike


@contextlib.contextmanager
def aimed(place: str, strike: Callable[[], None], times: int = SECOND) -> Iterator[None]:
    """Strike the second time that a place is entered, or another one."""
    owner, name = PLACES[place]
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    real, entered = getattr(owner, name), [0]

    def struck(*arguments: Any, **named: Any) -> Any:
        entered[0] += 1
        if entered[0] == times:
            strike()
        return real(*arguments, **named)

    setattr(owner, name, struck)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextlib.contextmanager
def counted(file: Path) -> Iterator[None]:
    """Leave the number of updates in a file."""
    real, number = Trainer.update, [0]

    def update(self: Trainer, step: int) -> None:
        real(self, step)
        number[0] += 1
        file.write_text(str(number[0]))

    Trainer.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.update = real  # type: ignore[method-assign]


def main(place: str, strike: str, rank: str, folder: str, *words: str) -> int:
    """One rank; a signal goes to its launcher."""
    from megarun.cli.main import run  # noqa: PLC0415

    action = full_disk if strike == full_disk.__name__ else sending(signal.Signals[strike], os.getppid())

    def noted() -> None:
        (Path(folder) / STRUCK).touch()
        action()

    here = os.environ["RANK"]
    with counted(Path(folder) / here), aimed(place, noted) if here == rank else contextlib.nullcontext():
        return run(words)


if __name__ == "__main__":
    from megarun.launch.failure import exit_process

    exit_process(main(*sys.argv[1:]))
