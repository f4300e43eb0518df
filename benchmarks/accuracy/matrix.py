"""The committed matrix of plans as jobs with their estimates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.plan.make import make_plan
from megaplan.spec.load import load_spec_text
from megarun.job.job import Job

MATRIX = Path(__file__).with_name("matrix.yaml")
ROOT = MATRIX.parent.parent.parent


@dataclass(frozen=True, slots=True)
class Case:
    """One plan of the matrix.

    Attributes:
        name: Name in the matrix file.
        job: Job that megarun would build.
        budget: megaplan's estimate.
        in_ci: Part of the subset that CI traces.
    """

    name: str
    job: Job
    budget: Budget
    in_ci: bool


def names(*, ci_only: bool = False, matrix: Path = MATRIX) -> list[str]:
    """Names of the plans, in order; of those that CI traces only."""
    return [entry["name"] for entry in yaml.safe_load(matrix.read_text())["plans"] if entry.get("ci", False) or not ci_only]


def found(matrix: Path = MATRIX) -> list[str]:
    """Names of the plans that are the smallest specs of failures that random plans found."""
    return [entry["name"] for entry in yaml.safe_load(matrix.read_text())["plans"] if "/found/" in entry.get("spec", "")]


def cases(chosen: frozenset[str] = frozenset(), matrix: Path = MATRIX, more: Sequence[str] = ()) -> Iterator[Case]:
    """Every plan of a matrix, or those named, with `more` overrides after its own.

    Raises:
        MegaplanError: A plan is not legal.
    """
    written = yaml.safe_load(matrix.read_text())
    for entry in written["plans"]:
        if chosen and entry["name"] not in chosen:
            continue
        overrides = [*written["families"].get(entry.get("of"), ()), *entry.get("set", ()), *more]
        text = (ROOT / entry["spec"]).read_text() if "spec" in entry else written["base"]
        spec = load_spec_text(text, name=f"{matrix.name}: {entry['name']}", overrides=overrides).spec
        if spec.split.objective is None:  # splits by FLOPs, so that a change of the time constants moves no plan of the table
            spec = spec.model_copy(update={"split": spec.split.model_copy(update={"objective": "bottleneck"})})
        job = Job.from_plan(make_plan(spec))
        yield Case(entry["name"], job, build_budget(job.spec, job.inventory, job.layout), entry.get("ci", False))
