"""Saving: state is copied to host memory, then written by a thread while training continues.

Training blocks only for the copy. One save is in progress at a time; the next one waits for it first.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

from megarun.checkpoint.lines import FIRST_LINE, Line
from megarun.checkpoint.manifest import FOLDER, Manifest, folder_name
from megarun.checkpoint.pieces import Pieces, PiecesSavePlanner
from megarun.checkpoint.remote import Owner, RemoteWriter, stage_of
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.state import whole_state
from megarun.checkpoint.storage import CheckpointWriter, UnseenFilesError, first_error, first_reason
from megarun.data.progress import START, DataProgress
from megarun.engine.trainer import Trainer
from megarun.errors import refusal
from megarun.job.run import Run
from megarun.launch.failure import has_lost_peer
from megarun.remote import RemotePath


class _Staged(AsyncStager):
    """DCP's stager for state that is already in host memory."""

    _synchronize_after_execute = False

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def synchronize_staging(self) -> None:
        """No staging is in progress."""

    def close(self) -> None:
        """The stager has no resources to release."""


class Saver:
    """Saves a trainer's state; collective, every rank calls every method at the same step.

    Args:
        run: The run: folder, which all ranks share, and plan.
        trainer: Trainer whose state is saved.
        group: gloo group of all ranks, used only by the saving threads.
        retention: Decides which older checkpoints are removed; by default only those of this run.
        owner: Claim of this job on a storage; None where there is none.

    Attributes:
        line: Line of new checkpoints in the run's folder.
    """

    def __init__(
        self, run: Run, trainer: Trainer, group: dist.ProcessGroup, retention: Retention | None = None, owner: Owner | None = None
    ) -> None:
        self._run, self._trainer, self._group, self._owner = run, trainer, group, owner
        self._retention = retention or Retention(run.checkpoints.keep)
        self.line: Line = FIRST_LINE
        self._host: dict[str, Pieces] = {}
        self._pending: tuple[int, Future[Any], CheckpointWriter] | None = None

    def save(self, step: int, data_progress: DataProgress = START) -> None:
        """Start to save the state after `step` optimizer steps; returns when the state is copied.

        Args:
            step: Optimizer steps done.
            data_progress: Skipped batches and the latest losses.

        Raises:
            MegaplanError: MP645 if the previous save failed.
        """
        self.wait()
        copies = {name: pieces.on_cpu(self._host.get(name)) for name, pieces in whole_state(self._trainer, self._run.job.inventory)}
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
        writer = self._writer(manifest)
        planner = PiecesSavePlanner()
        options: dict[str, Any] = {"storage_writer": writer, "planner": planner, "process_group": self._group, "async_stager": _Staged()}
        future = self._guarded(step, writer, lambda: async_save(copies, **options))
        self._pending = step, future, writer

    @property
    def failed(self) -> bool:
        """True if the save in progress is known to have failed on this rank; not collective, does not block."""
        if self._pending is None:
            return False
        future = self._pending[1]
        return future.done() and future.exception() is not None

    def wait(self) -> None:
        """Block until the save in progress is complete.

        Raises:
            MegaplanError: MP645 if it failed; earlier checkpoints are unchanged.
            RuntimeError: Another rank has ended meanwhile.
        """
        if self._pending is None:
            return
        (step, future, writer), self._pending = self._pending, None
        self._guarded(step, writer, future.result)

    def settle(self, seconds: float) -> None:
        """Wait for the save in progress to complete; its error, if any, is not raised."""
        if self._pending is not None:
            wait([self._pending[1]], seconds)

    def _writer(self, manifest: Manifest) -> CheckpointWriter:
        root, plan = self._run.keeps_in, self._run.plan.text
        if isinstance(root, RemotePath):
            return RemoteWriter(root, stage_of(self._run.out, self._trainer.mesh.rank), manifest, plan, self._retention, self._owner)
        return CheckpointWriter(root, manifest, plan, self._retention)

    def _guarded(self, step: int, writer: CheckpointWriter, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (CheckpointException, OSError, RuntimeError) as error:  # CheckpointException is not an Exception
            writer.discard()  # on every rank: the folder may not be shared between nodes
            first = first_error(error)[0]
            if isinstance(first, RuntimeError) and has_lost_peer(first):
                raise first from None  # the error must name the rank that has ended, not this save
            path = self._run.keeps_in / FOLDER / folder_name(step)
            hints = ("--out DIR    # a folder that all nodes share",) if isinstance(first, UnseenFilesError) else ()
            raise refusal("MP645", f"{path}: {first_reason(error)}", hints=hints, file=str(path.parent)) from None
