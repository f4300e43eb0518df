"""A run: the job that a plan states, and what the command line adds to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megaplan.plan.document import PlanDocument
from megaplan.plan.make import plan_text
from megaplan.plan.read import read_plan
from megarun.data.mix import TokenMix
from megarun.data.token_file import TokenFile
from megarun.job.job import Job

NOTHING = "0"
"""The validation fraction of a run that trains on all rows."""
AUTO, NEVER = KEYWORDS = ("auto", "never")


@dataclass(frozen=True, slots=True)
class Run:
    """A job with what the command line adds to it.

    Attributes:
        job: What the plan says.
        source: Its tokens.
        out: Folder for metrics.jsonl.
        num_steps: Optimizer steps; the learning rate's warm-up follows the plan's `training.steps` all the same.
        plan: As a checkpoint keeps it.
        checkpoints: When to save, and what to start from.
        held_out: What to evaluate on; None: nothing.
        tensorboard: Whether the metrics are written for TensorBoard too.
        compiled: Whether blocks go through torch.compile.
        validation_fraction: The part of every token file's rows that `source` leaves out, a decimal number.
    """

    job: Job
    source: TokenFile | TokenMix
    out: Path
    num_steps: int
    plan: SavedPlan
    checkpoints: Checkpoints
    held_out: HeldOut | None = None
    tensorboard: bool = False
    compiled: bool = False
    validation_fraction: str = NOTHING


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What to evaluate on, and when.

    Attributes:
        source: Tokens that training does not read.
        every: Optimizer steps between two evaluations; there is one after the last step too.
        num_batches: Global batches of an evaluation, no row twice.
    """

    source: TokenFile | TokenMix
    every: int
    num_batches: int


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """What a checkpoint keeps of its plan: the file's text, and both digests."""

    text: str
    model_digest: str
    plan_digest: str


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """When to save, and what to start from.

    Attributes:
        save_every: Optimizer steps between saves; 0: only when a signal stops the run.
        keep: Finished checkpoints to leave.
        resume: `auto`: the run's newest whole checkpoint, if it has one; `never`; or a checkpoint's folder.
        weights_only: Take parameters alone, and start at step 0.
        other_data: Go on also where the token files or their weights are not the checkpoint's.
    """

    save_every: int = 0
    keep: int = 2
    resume: str = "auto"
    weights_only: bool = False
    other_data: bool = False


DEFAULT_CHECKPOINTS = Checkpoints()


def read_job(plan: str | os.PathLike[str] | PlanDocument, seed: int | None) -> tuple[Job, SavedPlan]:
    """The job of a plan or of a plan file, with another seed if one is given, and the plan as a checkpoint keeps it.

    Raises:
        MegaplanError: The file is no plan, or was changed by hand.
    """
    document = plan if isinstance(plan, PlanDocument) else read_plan(os.fspath(plan))
    job = Job.from_plan(document)
    saved = SavedPlan(plan_text(document), document.digests.model, document.digests.plan)
    return (job if seed is None else job.with_seed(seed)), saved
