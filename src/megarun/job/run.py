"""A run: the job of a plan with the settings of the command line."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.errors import MegaplanError
from megaplan.plan.document import PlanDocument
from megaplan.plan.make import plan_text
from megaplan.plan.read import parse_plan, read_plan
from megarun.data.mix import TokenMix
from megarun.data.token_file import TokenFile
from megarun.job.job import Job
from megarun.remote import AnyPath, any_path

NOTHING = "0"
"""The validation fraction of a run that trains on all rows."""
AUTO, NEVER = KEYWORDS = ("auto", "never")


class Viewers(NamedTuple):
    """Places that get the metrics in addition to metrics.jsonl.

    Attributes:
        tensorboard: True for event files of TensorBoard.
        wandb: Project of Weights & Biases; empty for none.
    """

    tensorboard: bool = False
    wandb: str = ""


NO_VIEWERS = Viewers()


@dataclass(frozen=True, slots=True)
class Run:
    """A job with the settings of the command line.

    Attributes:
        job: Job of the plan.
        source: Training tokens.
        out: Output folder, for metrics.jsonl and, unless they are kept in a storage, checkpoints.
        num_steps: Optimizer steps; the learning-rate schedule still uses the plan's `training.steps`.
        plan: The plan as stored in checkpoints.
        checkpoints: Settings for saving and resuming.
        held_out: Evaluation data and interval; None for no evaluation.
        viewers: Other places of the metrics.
        compiled: True if blocks are compiled by torch.compile.
        validation_fraction: Share of every token file's rows that `source` excludes, a decimal number.
        plans: Text of each plan that a start of the job may train, by its name in the command line.
        options: Options that a restart takes from the job's start, by name.
        before: Checkpoints that were there when the job began.
    """

    job: Job
    source: TokenFile | TokenMix
    out: Path
    num_steps: int
    plan: "SavedPlan"
    checkpoints: "Checkpoints"
    held_out: "HeldOut | None" = None
    viewers: Viewers = NO_VIEWERS
    compiled: bool = False
    validation_fraction: str = NOTHING
    plans: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    @property
    def keeps_in(self) -> AnyPath:
        """Root of the folder `checkpoints`: the output folder, or a storage."""
        return any_path(self.checkpoints.url) if self.checkpoints.url else self.out


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Evaluation data and interval.

    Attributes:
        source: Tokens that are not used for training.
        every: Optimizer steps between two evaluations; the last step is always followed by one.
        num_batches: Number of global batches per evaluation, without repeated rows.
    """

    source: TokenFile | TokenMix
    every: int
    num_batches: int


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The plan as stored in a checkpoint: the file's text, and both digests."""

    text: str
    model_digest: str
    plan_digest: str


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Settings for saving and resuming.

    Attributes:
        save_every: Optimizer steps between saves; 0: save only when a signal stops the run.
        keep: Number of finished checkpoints to keep.
        resume: `auto`: the run's newest complete checkpoint, if there is one; `never`; or a checkpoint's folder.
        weights_only: True to load only the parameters and start at step 0.
        other_data: True if the token files or their weights may differ from the checkpoint's.
        url: Storage that keeps checkpoints instead of the output folder; empty: none.
        memory_copies: True if every rank's last states are also kept in the memory of its node and of another one.
        check_replicas: Steps between two comparisons of the ranks' copies of state; 0: none.
    """

    save_every: int = 0
    keep: int = 2
    resume: str = "auto"
    weights_only: bool = False
    other_data: bool = False
    url: str = ""
    memory_copies: bool = False
    check_replicas: int = 0


DEFAULT_CHECKPOINTS = Checkpoints()


def job_of(text: str, name: str, seed: int | None) -> tuple[Job, SavedPlan]:
    """The job of a plan's text, as `read_job` gives it of a file.

    Raises:
        MegaplanError: It is not a plan, or was edited by hand.
    """
    loaded = parse_plan(text, name)
    if loaded.tampered:
        raise MegaplanError(loaded.tampered)
    return read_job(loaded.plan, seed)


def read_job(plan: str | os.PathLike[str] | PlanDocument, seed: int | None) -> tuple[Job, SavedPlan]:
    """The job of a plan or of a plan file, with another seed if one is given, and the plan as a checkpoint keeps it.

    Raises:
        MegaplanError: The file is not a plan, or was edited by hand.
    """
    document = plan if isinstance(plan, PlanDocument) else read_plan(os.fspath(plan))
    job = Job.from_plan(document)
    saved = SavedPlan(plan_text(document), document.digests.model, document.digests.plan)
    return (job if seed is None else job.with_seed(seed)), saved
