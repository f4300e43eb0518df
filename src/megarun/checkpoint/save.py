"""Saving: copied to host memory, then written by a thread while training goes on.

The copy is what training waits for. One save is under way at a time; the next one waits for it first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

from megarun.checkpoint.lines import FIRST_LINE, Line
from megarun.checkpoint.manifest import FOLDER, Manifest, folder_name
from megarun.checkpoint.pieces import Pieces, PiecesSavePlanner
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.state import generator_state, model_state, optimizer_state
from megarun.checkpoint.storage import CheckpointWriter, UnseenFilesError, first_error, first_reason
from megarun.data.progress import START, DataProgress
from megarun.engine.trainer import Trainer
from megarun.errors import refusal
from megarun.job.run import Run


class _Staged(AsyncStager):
    """DCP's stager for a state that lies in host memory already."""

    _synchronize_after_execute = False

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def synchronize_staging(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


class Saver:
    """Saves a trainer's state; collective, every rank calls every method at the same step.

    Args:
        run: Folder, which all ranks see, and plan.
        trainer: Whose state is saved.
        group: A gloo group of all ranks for the saving threads alone.
        retention: Which older checkpoints go; none that this run has not made, if it is not given.

    Attributes:
        line: Of what is saved from now on, in the run's folder.
    """

    def __init__(self, run: Run, trainer: Trainer, group: dist.ProcessGroup, retention: Retention | None = None) -> None:
        self._run, self._trainer, self._group = run, trainer, group
        self._retention = retention or Retention(run.checkpoints.keep)
        self.line: Line = FIRST_LINE
        self._host: dict[str, Pieces] = {}
        self._pending: tuple[int, Future[Any], CheckpointWriter] | None = None

    def save(self, step: int, data_progress: DataProgress = START) -> None:
        """Begin to save the state after `step` optimizer steps; returns when it has been copied.

        Args:
            step: Steps done.
            data_progress: Skipped batches and the latest losses.

        Raises:
            MegaplanError: MP645 if the save before has failed.
        """
        self.wait()
        copies = {name: pieces.on_cpu(self._host.get(name)) for name, pieces in self._state()}
        if self._trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.mesh.device)
        self._host = copies
        job, plan = self._run.job, self._run.plan
        manifest = Manifest(
            step=step,
            seed=job.spec.training.seed,
            global_batch=job.global_batch,
            model_digest=plan.model_digest,
            plan_digest=plan.plan_digest,
            world_size=job.spec.mesh.world_size,
            torch=torch.__version__,
            files={},
            data_progress=data_progress,
            validation_fraction=self._run.validation_fraction,
            line=self.line,
            data=self._run.source.identity,
        )
        writer = CheckpointWriter(self._run.out, manifest, plan.text, self._retention)
        planner = PiecesSavePlanner()
        options: dict[str, Any] = {"storage_writer": writer, "planner": planner, "process_group": self._group, "async_stager": _Staged()}
        future = self._guarded(step, writer, lambda: async_save(copies, **options))
        self._pending = step, future, writer

    @property
    def failed(self) -> bool:
        """Whether this rank knows already that the save under way has failed; asks nobody, waits for nothing."""
        if self._pending is None:
            return False
        future = self._pending[1]
        return future.done() and future.exception() is not None

    def wait(self) -> None:
        """Until the save under way is whole.

        Raises:
            MegaplanError: MP645 if it has failed; checkpoints before it are as they were.
        """
        if self._pending is None:
            return
        (step, future, writer), self._pending = self._pending, None
        self._guarded(step, writer, future.result)

    def _state(self) -> list[tuple[str, Pieces]]:
        inventory = self._run.job.inventory
        return [
            *model_state(self._trainer, inventory),
            *optimizer_state(self._trainer, inventory),
            *generator_state(self._trainer),
        ]

    def _guarded(self, step: int, writer: CheckpointWriter, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (CheckpointException, OSError, RuntimeError) as error:  # CheckpointException is no Exception
            writer.discard()  # every rank, for the folder of another node may be another one
            path = self._run.out / FOLDER / folder_name(step)
            hints = ("--out DIR    # a folder that all nodes share",) if isinstance(first_error(error)[0], UnseenFilesError) else ()
            raise refusal("MP645", f"{path}: {first_reason(error)}", hints=hints, file=str(path.parent)) from None
