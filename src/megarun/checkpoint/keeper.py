"""A run's checkpoints, as the training loop sees them: where to start, and when to save."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from megarun.checkpoint.manifest import read_manifest
from megarun.checkpoint.resume import Found, begin_line, damage, load_checkpoint, newest_whole
from megarun.checkpoint.retention import Retention
from megarun.checkpoint.save import Saver
from megarun.data.progress import START, DataProgress
from megarun.engine.trainer import Trainer
from megarun.errors import refusal
from megarun.job.run import AUTO, NEVER, Run
from megarun.launch.interrupt import Interrupt, largest


class Keeper:
    """Finds a start, reads it, and saves; every method is collective.

    Attributes:
        control: A gloo group of all ranks, for what they agree on between two steps without waiting for a device.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: Found | None = None
        self._retention = Retention(run.checkpoints.keep)
        self.control: dist.ProcessGroup = dist.new_group(backend="gloo")
        self._saving: dist.ProcessGroup = dist.new_group(backend="gloo")  # the saving thread's own: collectives of two threads must not mix
        self._saver: Saver | None = None

    def find(self) -> Found | None:
        """The checkpoint to start from; None to start anew.

        Raises:
            MegaplanError: MP644 if the one that was named is damaged.
        """
        wanted = self._run.checkpoints.resume
        if wanted == AUTO:
            self._found = newest_whole(self._run.out, self.control, self._retention.damaged)
        elif wanted != NEVER:
            wrong = damage(Path(wanted), self.control)
            if wrong is not None:
                raise refusal("MP644", wrong, file=wanted)
            self._found = Found(Path(wanted), read_manifest(Path(wanted)))
        if self._found is not None and self._found.within(self._run.out):
            self._retention.start = self._found.path
        return self._found

    def start(self, trainer: Trainer) -> tuple[int, DataProgress]:
        """Read the checkpoint that was found into a new trainer; the number of steps done, and its data progress.

        Raises:
            MegaplanError: It does not fit the plan, or cannot be read.
        """
        run = self._run
        self._saver = Saver(run, trainer, self._saving, self._retention)
        if self._found is None:
            self._saver.line = begin_line(run.out, None, 0, self.control)
            return 0, START
        started = load_checkpoint(self._found, trainer, run, weights_only=run.checkpoints.weights_only, group=self.control)
        self._saver.line = begin_line(run.out, None if run.checkpoints.weights_only else self._found, started[0], self.control)
        if trainer.mesh.rank == 0:
            what = "parameters of " if run.checkpoints.weights_only else ""
            sys.stderr.write(f"resumed from {what}{self._found.path}, {self._found.manifest.step} steps done\n")
        return started

    def last(self) -> Found | None:
        """The checkpoint that a run can go back to: the newest whole one it came of; None if there is none.

        Raises:
            MegaplanError: MP645 if the save under way fails.
        """
        if self._saver is None:
            raise RuntimeError("`start` comes before the first step")
        self._saver.wait()
        given = None if self._run.checkpoints.weights_only else self._found
        return newest_whole(self._run.out, self.control, self._retention.damaged, self._saver.line) or given

    def go_back(self, trainer: Trainer, found: Found) -> tuple[int, DataProgress]:
        """Read a checkpoint into a trainer that has stepped; the number of steps done, and its data progress.

        Raises:
            MegaplanError: It cannot be read.
        """
        return load_checkpoint(found, trainer, self._run, weights_only=False, group=self.control)

    def poll_interrupt(self, interrupt: Interrupt) -> int:
        """The signal that any rank has received, 0 if none; asked after every step.

        Raises:
            MegaplanError: MP645 if the save under way has failed on any rank: what is trained after it would only be lost.
        """
        number, failed = largest([interrupt.received, int(self._saver is not None and self._saver.failed)], self.control)
        if failed and self._saver is not None:
            self._saver.wait()
        return number

    def after(self, step: int, data_progress: DataProgress, *, last: bool, stopped: bool) -> None:
        """Save what a step has left if it is time to, or if the run ends here.

        Args:
            step: Steps done.
            data_progress: Of the run at that step.
            last: The run's last step.
            stopped: A signal ends the run.

        Raises:
            MegaplanError: MP645 if this or the save before failed.
        """
        if self._saver is None:
            raise RuntimeError("`start` comes before the first step")
        every = self._run.checkpoints.save_every
        if stopped or (every and (last or step % every == 0)):
            self._saver.save(step, data_progress)
        if stopped or last:
            self._saver.wait()
        if stopped and dist.get_rank() == 0:
            sys.stderr.write(f"stopped after step {step}, saved; the same command resumes\n")
