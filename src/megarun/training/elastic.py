"""`--plans`: the plan for the processes that torchrun has started, of several plans of one run; needs no torch.

When a node is lost, torchrun starts the processes of the others again (`--nnodes MIN:MAX --max-restarts N`). The processes take the largest
plan for which there are enough of them and resume from the last complete checkpoint; processes without a rank wait as spares. Every plan
has the model, seed and global batch of the first one, so steps and data order do not change.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from megaplan.errors import MegaplanError
from megaplan.plan.document import PlanDocument
from megaplan.plan.make import plan_text
from megaplan.plan.read import read_plan
from megaplan.terminal.output import note
from megarun.errors import refusal
from megarun.job.job import Job
from megarun.job.run import SavedPlan, job_of, read_job
from megarun.training.identity import Beginning, report_plans, restarted_from
from megarun.training.prepare import out_folder

Planned = tuple[Job, SavedPlan]


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans that a start of a job may train.

    Attributes:
        jobs: The job of each plan and its text, by name; the first is the command line's.
        began: Content of `job.json` if this start is a restart.
        out: Folder of the run.
    """

    jobs: dict[str, Planned]
    began: Beginning | None
    out: Path

    @property
    def texts(self) -> dict[str, str]:
        """Text of each plan by name."""
        return {name: saved.text for name, (_, saved) in self.jobs.items()}


PROCESSES = "WORLD_SIZE"
FIRST_PLAN = "PLAN"


def read_plans(plan: str | os.PathLike[str] | PlanDocument, folder: Path | None, seed: int | None, out: str | os.PathLike[str]) -> Plans:
    """The plans that a start of the job may train.

    Args:
        plan: The plan of the command line, a file or a value.
        folder: Folder of `*.json` plans, for fewer GPUs; None: there is only the first one.
        seed: `--seed`, for every plan.
        out: Folder of the run: a restart by torchrun takes the plans from there.

    Raises:
        MegaplanError: A file is not a plan; MP667 if a plan belongs to another run, or the folder has no plan; MP670 if `out` is empty.
    """
    place = out_folder(out)
    name = FIRST_PLAN if isinstance(plan, PlanDocument) else os.fspath(plan)
    began = restarted_from(place)
    if began is not None:
        report_plans(began, {each: _text_now(plan if each == name else each) for each in began.plans}, place)
        return Plans({each: job_of(text, each, seed) for each, text in began.plans.items()}, began, place)
    plans = {name: read_job(plan, seed)}
    if folder is not None:
        files = sorted(folder.glob("*.json")) if folder.is_dir() else []
        if not files:
            raise refusal("MP667", f"--plans {folder}: no *.json", "--plans", file=str(folder))
        for file in files:
            other = read_job(file, seed)
            if wrong := _difference(plans[name], other):
                raise refusal("MP667", wrong, "--plans", file=str(file))
            plans.setdefault(str(file), other)
    return Plans(plans, None, place)


def choose_plan(planned: Plans, folder: Path | None, num_processes: int) -> Planned:
    """The plan with the most ranks that the processes can fill; without a folder, the first one.

    Rank 0 reports on stderr which it is. Of plans with the same number of ranks, the first plan is preferred, then the first by file name.

    Args:
        planned: The plans.
        folder: Folder of `--plans`; None: there is only the first one.
        num_processes: Processes that were started.

    Raises:
        MegaplanError: MP667 if every plan has more ranks.
    """
    plans = [(job, name if index else FIRST_PLAN) for index, (name, job) in enumerate(planned.jobs.items())]
    if folder is None:
        return plans[0][0]
    fitting = [each for each in plans if _ranks(each[0]) <= num_processes]
    if not fitting:
        sizes = ", ".join(map(str, sorted({_ranks(each) for each, _ in plans})))
        raise refusal("MP667", f"{num_processes} processes, and plans for {sizes} ranks", "--plans", file=str(folder))
    taken, name = max(fitting, key=lambda each: _ranks(each[0]))  # the first of equal ones
    if os.environ.get("RANK", "0") == "0":
        note([f"plan {name}: {_ranks(taken)} ranks, {num_processes - _ranks(taken)} spare processes"])
    return taken


def _text_now(plan: str | os.PathLike[str] | PlanDocument) -> str | None:
    """Text of a plan as it is now; None if it cannot be read."""
    try:
        return plan_text(plan if isinstance(plan, PlanDocument) else read_plan(os.fspath(plan)))
    except MegaplanError:
        return None


def started_processes() -> int:
    """Processes of this start, as torchrun says.

    Raises:
        MegaplanError: MP652: the variable is not a number.
    """
    given = os.environ.get(PROCESSES, "1")
    if not given.isdecimal() or not int(given):
        raise refusal("MP652", f"{PROCESSES} = {given or 'empty'}")
    return int(given)


def _ranks(planned: Planned) -> int:
    return planned[0].spec.mesh.world_size


def _difference(first: Planned, other: Planned) -> str:
    """Reason why a checkpoint of one plan cannot continue under the other; empty if it can."""
    if first[1].model_digest != other[1].model_digest:
        return f"model digest {other[1].model_digest}, PLAN's {first[1].model_digest}"
    if first[0].global_batch != other[0].global_batch:
        ours, its = (
            f"{sequences:,} sequences of {length:,} tokens" for sequences, length in (other[0].global_batch, first[0].global_batch)
        )
        return f"global batch {ours}, PLAN's {its}"
    found, planned = (each[0].spec.training.model_dump(mode="json") for each in (other, first))
    changed = [f"training.{name} = {found[name]}, PLAN's {planned[name]}" for name in found if found[name] != planned[name]]
    return "\n".join(changed)
