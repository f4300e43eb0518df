"""The numbers of metrics.jsonl for TensorBoard, if its package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError, Severity
from megaplan.terminal.output import report
from megarun.errors import refusal
from megarun.files import make_own_folder

FOLDER = "tensorboard"


def require_tensorboard() -> None:
    """Refuse to start without the package.

    Raises:
        MegaplanError: MP624.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise refusal("MP624", "the package `tensorboard` is not installed", hints=("pip install 'megaplan[tensorboard]'",))


class Board:
    """Scalars under `DIR/tensorboard`, by step. The first failure to write ends the curves, not the run, and is said.

    Raises:
        MegaplanError: MP671, the folder is a link.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._writer: Any = None
        self._try(self._open)

    def write(self, line: Mapping[str, object]) -> None:
        """Write every number of a line; lists over ranks or layers become one curve per rank or layer."""
        for key, value in line.items():
            parts = dict(enumerate(value)) if isinstance(value, list) else value
            values = {f"{key}/{part}": one for part, one in parts.items()} if isinstance(parts, dict) else {key: value}
            for name, one in values.items():
                if key != "step" and isinstance(one, int | float) and not isinstance(one, bool) and self._writer is not None:
                    self._try(partial(self._writer.add_scalar, name, one, line["step"]))

    def close(self) -> None:
        """Flush buffered events to disk."""
        if self._writer is not None:
            self._try(self._writer.close)

    def _open(self) -> None:
        make_own_folder(self._folder)
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an optional package)

        self._writer = SummaryWriter(str(self._folder))

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except MegaplanError:
            raise
        except Exception as error:  # of another project's writer and of its thread
            self._writer = None
            detail = f"{self._folder}: {error}; there are no further curves, and the run continues"
            report([diagnostic("MP661", detail, Location(file=str(self._folder)), severity=Severity.WARNING)])
