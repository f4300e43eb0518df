"""The numbers of metrics.jsonl for TensorBoard, if its package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarun.errors import refusal

FOLDER = "tensorboard"


def require_tensorboard() -> None:
    """Refuse to start without the package.

    Raises:
        MegaplanError: MP624.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise refusal("MP624", "the package `tensorboard` is not installed", hints=("pip install 'megaplan[tensorboard]'",))


class Board:
    """Scalars under `DIR/tensorboard`, by step."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an optional package)

        self._writer: Any = SummaryWriter(str(folder / FOLDER))

    def write(self, line: Mapping[str, object]) -> None:
        """Write every number of a line; lists over ranks or layers become one curve per rank or layer."""
        for key, value in line.items():
            parts = dict(enumerate(value)) if isinstance(value, list) else value
            values = {f"{key}/{part}": one for part, one in parts.items()} if isinstance(parts, dict) else {key: value}
            for name, one in values.items():
                if key != "step" and isinstance(one, int | float) and not isinstance(one, bool):
                    self._writer.add_scalar(name, one, line["step"])

    def close(self) -> None:
        """Flush buffered events to disk."""
        self._writer.close()
