"""The checkpoint interface of the training loop: where to start, and when to save."""

import shutil
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from megaplan.errors import MegaplanError
from megaplan.terminal.output import note
from megarun.checkpoint.leftovers import tidy
from megarun.checkpoint.manifest import FOLDER, finished
from megarun.checkpoint.memory import MemoryCopies, Record
from megarun.checkpoint.remote import Owner, stage_of
from megarun.checkpoint.resume import UNREADABLE, Found, begin_line, load_checkpoint, newest_complete, report_skipped, verified
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.save import Saver
from megarun.checkpoint.state import whole_state
from megarun.data.progress import START, DataProgress
from megarun.engine.trainer import Trainer
from megarun.errors import refusal
from megarun.job.run import AUTO, NEVER, Run
from megarun.launch.failure import has_lost_peer
from megarun.launch.interrupt import Interrupt, largest
from megarun.remote import RemotePath, any_path

SETTLE_SECONDS = 5.0
"""Shorter than the time for which the other ranks of a failed job wait before they exit."""


class Keeper:
    """Finds the checkpoint to start from, reads it, and saves; every method is collective.

    Args:
        run: The run.
        require_folder: Called by rank 0 before a save; raises if the folder is no longer this job's.

    Attributes:
        control: gloo group of all ranks, for agreement between two steps without a device synchronisation.
    """

    def __init__(self, run: Run, require_folder: Callable[[], None] | None = None) -> None:
        self._run, self._require_folder = run, require_folder
        self._found: Found | None = None
        self._retention = Retention(run.checkpoints.keep)
        root = run.keeps_in
        self._owner = Owner(root) if isinstance(root, RemotePath) else None
        self.control: dist.ProcessGroup = dist.new_group(backend="gloo")
        self._saving: dist.ProcessGroup = dist.new_group(backend="gloo")  # for the saving thread alone
        self._saver: Saver | None = None
        self._copies = MemoryCopies.of_job(run.plan.plan_digest, self.control) if run.checkpoints.memory_copies else None
        self._copy: Record | None = None
        self._trainer: Trainer | None = None

    @property
    def continues(self) -> bool:
        """True if the run continues from a checkpoint or from copies in memory, once `find` has looked for them."""
        return self._found is not None or self._copy is not None

    def find(self) -> Found | None:
        """The checkpoint to start from; None to start from step 0.

        Raises:
            MegaplanError: MP644 if the checkpoint named by --resume is damaged; MP608 if a storage has a run and --resume is `never`.
            StorageError: The storage fails.
        """
        wanted, root = self._run.checkpoints.resume, self._run.keeps_in
        if self._owner is not None:
            shutil.rmtree(stage_of(self._run.out, dist.get_rank()), ignore_errors=True)
        if dist.get_rank() == 0:
            if self._owner is not None:
                if wanted == NEVER and finished(root):
                    raise refusal("MP608", f"{root / FOLDER} has checkpoints", hints=(f"--checkpoint-url {root}-2",), file=str(root))
                self._owner.claim()
            for restored in tidy(root):
                note([f"restored {restored}, which a killed save had renamed"])
        dist.barrier(self.control)  # no rank looks for checkpoints before this
        if wanted == AUTO:
            self._found = newest_complete(root, self.control, self._retention.damaged)
        elif wanted != NEVER:
            path = any_path(wanted)
            found = verified(path, self.control)
            if isinstance(found, str):
                raise refusal("MP644", found, file=wanted)
            self._found = found
        if self._found is not None and self._found.within(root):
            self._retention.start = self._found.path
        copy = self._copies.newest() if self._copies is not None else None
        if copy is not None and (self._found is None or copy.step >= self._found.manifest.step):
            self._copy = copy
        return self._found

    def start(self, trainer: Trainer) -> tuple[int, DataProgress]:
        """Load the checkpoint that was found into a new trainer; returns the number of steps done and the data progress.

        Raises:
            MegaplanError: It does not fit the plan, or cannot be read.
        """
        run, self._trainer = self._run, trainer
        self._saver = Saver(run, trainer, self._saving, self._retention, self._owner)
        if self._copy is not None and self._copies is not None:
            return self._from_memory(trainer, self._copy, self._copies)
        if self._found is None:
            self._saver.line = begin_line(run.keeps_in, None, 0, self.control)
            return 0, START
        started = self._load(trainer)
        weights_only = run.checkpoints.weights_only
        self._saver.line = begin_line(run.keeps_in, None if weights_only else self._found, started[0], self.control)
        if trainer.mesh.rank == 0:
            what = "parameters of " if weights_only else ""
            note([f"resumed from {what}{self._found.path}, {self._found.manifest.step} steps done"])
        return started

    def _from_memory(self, trainer: Trainer, copy: Record, copies: MemoryCopies) -> tuple[int, DataProgress]:
        """Continue from the copies of a step; the checkpoint that was found is an ancestor."""
        run = self._run
        assert self._saver is not None
        trainer.optimizers.make_states()
        copies.load(copy.step, whole_state(trainer, run.job.inventory))
        self._saver.line = begin_line(run.keeps_in, self._found, copy.step, self.control)
        if trainer.mesh.rank == 0:
            note([f"resumed from copies in memory, {copy.step} steps done"])
        return copy.step, copy.data_progress

    def _load(self, trainer: Trainer) -> tuple[int, DataProgress]:
        """Load the checkpoint that was found; with `--resume auto` an unreadable checkpoint is skipped for the previous one.

        Its files match their checksums, so either it was already unreadable when it was saved, or the disk fails now.
        """
        run = self._run
        while True:
            assert self._found is not None
            try:
                return load_checkpoint(self._found, trainer, run, weights_only=run.checkpoints.weights_only, group=self.control)
            except MegaplanError as error:
                if run.checkpoints.resume != AUTO or error.diagnostics[0].code != UNREADABLE:
                    raise
                self._retention.damaged.add(self._found.path)
                found = newest_complete(run.keeps_in, self.control, self._retention.damaged)
                if found is None:  # parameters may be half loaded, so there is no start from step 0
                    raise
                report_skipped(self._found.path, error.diagnostics[0].detail)
                self._found, self._retention.start = found, found.path

    def last(self) -> Found | None:
        """The checkpoint that a run can rewind to: its newest complete ancestor; None if there is none.

        Raises:
            MegaplanError: MP645 if the save in progress fails.
        """
        if self._saver is None:
            raise RuntimeError("call `start` before the first step")
        self._saver.wait()
        given = None if self._run.checkpoints.weights_only else self._found
        return newest_complete(self._run.keeps_in, self.control, self._retention.damaged, self._saver.line) or given

    def finish_save(self) -> None:
        """Wait for the save in progress, which an error that every rank meets must not cost.

        Raises:
            MegaplanError: MP645 if it fails.
        """
        if self._saver is not None:
            self._saver.wait()

    def settle(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Before a job ends with an error of this rank, wait a little for the save in progress, which other ranks' threads also finish."""
        if isinstance(error, Exception) and not has_lost_peer(error) and self._saver is not None:
            self._saver.settle(SETTLE_SECONDS)

    def forget_copies(self) -> None:
        """Invalidate the copies in memory: a restart uses a checkpoint."""
        if self._copies is not None:
            self._copies.forget()

    def await_copies(self) -> None:
        """Wait until the copy of the last step is with the peer, so that a loss after the next update costs only that step."""
        if self._copies is not None:
            self._copies.wait()

    def go_back(self, trainer: Trainer, found: Found) -> tuple[int, DataProgress]:
        """Load a checkpoint into a trainer that has stepped; returns the number of steps done and the data progress.

        Raises:
            MegaplanError: The checkpoint cannot be read.
        """
        self.forget_copies()
        return load_checkpoint(found, trainer, self._run, weights_only=False, group=self.control)

    def poll_interrupt(self, interrupt: Interrupt) -> int:
        """The signal that any rank has received, 0 if none; called after every step.

        Raises:
            MegaplanError: MP645 if the save in progress has failed on any rank: later steps would be lost.
        """
        number, failed = largest([interrupt.received, int(self._saver is not None and self._saver.failed)], self.control)
        if failed and self._saver is not None:
            self._saver.wait()
        return number

    def saves(self, step: int, *, last: bool, stopped: bool) -> bool:
        """True if `after` saves a checkpoint after this step."""
        every = self._run.checkpoints.save_every
        return stopped or (every > 0 and (last or step % every == 0))

    def after(self, step: int, data_progress: DataProgress, *, last: bool, stopped: bool) -> None:
        """Save after a step if a save is due, or if the run ends.

        Args:
            step: Optimizer steps done.
            data_progress: Data progress of the run at that step.
            last: True if it is the run's last step.
            stopped: True if a signal ends the run.

        Raises:
            MegaplanError: MP645 if this save or the previous one failed; MP658 if another job has taken over the folder.
        """
        if self._saver is None or self._trainer is None:
            raise RuntimeError("call `start` before the first step")
        if self.saves(step, last=last, stopped=stopped):
            if self._require_folder is not None:
                self._require_folder()
            if self._owner is not None and dist.get_rank() == 0:
                self._owner.require()
            self._saver.save(step, data_progress)
        if self._copies is not None and not (stopped or last):
            self._copies.keep(step, data_progress, whole_state(self._trainer, self._run.job.inventory))
        if stopped or last:
            self._saver.wait()
            if self._copies is not None:
                self._copies.close()
        if stopped and dist.get_rank() == 0:
            note([f"stopped after step {step} and saved; run the same command to resume"])
