"""`--plans`: the plan for the processes that torchrun has started, of several plans of one run; needs no torch.

When a node is lost, torchrun starts the processes of the others again (`--nnodes MIN:MAX --max-restarts N`). They take the largest plan
that they have ranks for and resume from the last whole checkpoint; processes without a rank wait as spares. Every plan has the model, seed
and global batch of the first one, so step and data order stay.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megarun.errors import refusal
from megarun.job.job import Job
from megarun.job.run import SavedPlan, read_job

Planned = tuple[Job, SavedPlan]
PROCESSES = "WORLD_SIZE"
FIRST_PLAN = "PLAN"


def choose_plan(first: Planned, folder: Path | None, seed: int | None, num_processes: int) -> Planned:
    """The plan of most ranks among the first one and those of a folder that has no more ranks than there are processes.

    Rank 0 reports on stderr which it is. Of plans with equally many ranks the first one is taken, then that whose file comes first by name.

    Args:
        first: The plan of the command line.
        folder: Folder of `*.json` plans, for fewer GPUs; None: there is only the first one.
        seed: `--seed`, for every plan.
        num_processes: Processes that were started.

    Raises:
        MegaplanError: MP667 if a plan is of another run, or every plan has more ranks; or a file is no plan.
    """
    if folder is None:
        return first
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise refusal("MP667", f"--plans {folder}: no *.json", "--plans", file=str(folder))
    plans: list[tuple[Planned, str]] = [(first, FIRST_PLAN)]
    for file in files:
        other = read_job(file, seed)
        wrong = _difference(first, other)
        if wrong:
            raise refusal("MP667", wrong, "--plans", file=str(file))
        plans.append((other, str(file)))
    fitting = [each for each in plans if _ranks(each[0]) <= num_processes]
    if not fitting:
        sizes = ", ".join(map(str, sorted({_ranks(each) for each, _ in plans})))
        raise refusal("MP667", f"{num_processes} processes, and plans for {sizes} ranks", "--plans", file=str(folder))
    taken, name = max(fitting, key=lambda each: _ranks(each[0]))  # the first of equal ones
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"plan {name}: {_ranks(taken)} ranks, {num_processes - _ranks(taken)} spare processes\n")
    return taken


def started_processes() -> int:
    """Processes of this start, as torchrun says."""
    return int(os.environ.get(PROCESSES, "1"))


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
