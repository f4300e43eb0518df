"""The numbers of metrics.jsonl for TensorBoard and for Weights & Biases, if their packages are installed."""

import importlib.util
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError, Severity
from megaplan.terminal.output import report
from megarun.errors import refusal
from megarun.files import make_own_folder, open_own, read_bounded

INIT_SECONDS = 60.0
"""Time that Weights & Biases may take to begin a run."""


def require_package(name: str) -> None:
    """Refuse to start without the package `tensorboard` or `wandb`.

    Raises:
        MegaplanError: MP624.
    """
    if importlib.util.find_spec(name) is None:
        raise refusal("MP624", f"the package `{name}` is not installed", hints=(f"pip install 'megaplan[{name}]'",))


class Curves(ABC):
    """One curve for each number of metrics.jsonl, in a folder of the run. The first failure is reported and ends the curves, not the run.

    Raises:
        MegaplanError: MP671, the folder is a link.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._try(self._begin)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write every number of a line; lists over ranks or layers become one curve per rank or layer."""
        values = dict[str, int | float]()
        for key, value in line.items():
            parts = dict(enumerate(value)) if isinstance(value, list) else value
            named = {f"{key}/{part}": one for part, one in parts.items()} if isinstance(parts, dict) else {key: value}
            values |= {name: one for name, one in named.items() if isinstance(one, int | float) and not isinstance(one, bool)}
        step = int(values.pop("step"))
        if self._writer is not None:
            self._try(partial(self._put, values, step))

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._try(self._end)

    def _begin(self) -> None:
        make_own_folder(self._folder)
        self._writer = self._open()

    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    def _put(self, values: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except MegaplanError:
            raise
        except Exception as error:  # exceptions of another project's writer and of its threads
            self._writer = None
            said = (str(error).splitlines() or [type(error).__name__])[0]
            detail = f"{self._folder}: {said}; there are no further curves, and the run continues"
            report([diagnostic("MP661", detail, Location(file=str(self._folder)), severity=Severity.WARNING)])


class TensorBoard(Curves):
    """Event files in `DIR/tensorboard`."""

    def __init__(self, out: Path) -> None:
        super().__init__(out / "tensorboard")

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an optional package)

        return SummaryWriter(str(self._folder))

    def _put(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _end(self) -> None:
        self._writer.close()


class WeightsAndBiases(Curves):
    """A run of Weights & Biases, whose identity and files are in `DIR/wandb`; a restart continues it.

    WANDB_MODE=offline keeps it there for `wandb sync`. Without a login the package refuses to begin, which is reported without a prompt.
    """

    def __init__(self, out: Path, project: str, config: Mapping[str, Any]) -> None:
        self._project, self._name, self._config = project, out.resolve().name, config
        super().__init__(out / "wandb")

    def _open(self) -> Any:
        import wandb  # noqa: PLC0415  (an optional package)

        # Its console capture would replace streams that a run guards, and its prompts would wait for an answer.
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, init_timeout=INIT_SECONDS, login_timeout=INIT_SECONDS
        )
        run = wandb.init(
            project=self._project,
            name=self._name,
            id=self._identity(),
            resume="allow",
            dir=str(self._folder.parent),
            config=dict(self._config),
            settings=quiet,
        )
        run.define_metric("*", step_metric="step")  # steps that are repeated after a restart are logged again
        return run

    def _identity(self) -> str:
        path = self._folder / "megarun-id"
        try:
            return read_bounded(path, 64).strip()
        except (OSError, ValueError):
            found = secrets.token_hex(4)
            with open_own(path, 0) as file:
                file.write(found.encode())
            return found

    def _put(self, values: Mapping[str, float], step: int) -> None:
        self._writer.log({**values, "step": step})

    def _end(self) -> None:
        self._writer.finish()
