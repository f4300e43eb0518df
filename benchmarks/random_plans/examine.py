"""One random plan: split, estimated, traced rank by rank, and every way in which the two differ."""

import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError, Severity
from megaplan.plan.make import make_plan
from megaplan.spec.document import Document, SourceMap
from megaplan.spec.host import device_of
from megaplan.spec.load import check_document
from megaplan.spec.pools import spec_on
from megarun.job.job import Job
from megarun.job.support import refuse_unbuilt
from megarun.trace.compare import Pair, RankComparison
from megarun.trace.run import choose_ranks

OK, FAILED, ILLEGAL, NOTED = "ok", "failed", "illegal", "noted"
"""Verdicts: within tolerance; wrong; refused by `megaplan split` with diagnostics; not built by megarun, as the plan notes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One way in which a plan is wrong.

    Attributes:
        kind: `phase` or `column` past tolerance, `negative` cell, `refused` without a note, `crash`, `timeout`.
        where: The phase, or phase and column, or code, or place of a crash; with `kind` the class of the failure.
        rank: A rank that has it; -1 for the whole plan.
        weight: Size of the error, as a share of the trace or, for a column, of the rank's peak.
        said: Numbers and names, for a person.
    """

    kind: str
    where: str
    rank: int = -1
    weight: float = 0.0
    said: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The class: a shrunk spec must fail in the same."""
        return f"{self.kind} {self.where}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of an examination.

    Attributes:
        outcome: One of the four words above.
        failures: The heaviest first.
        ranks: Distinct ranks traced.
        codes: Codes of the diagnostics, if the plan was refused or noted.
        worst: The largest error of a peak or phase, signed.
        seconds: Processor time.
    """

    outcome: str
    failures: tuple[Failure, ...] = ()
    ranks: int = 0
    codes: tuple[str, ...] = ()
    worst: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Found:
    failures: list[Failure] = field(default_factory=list)
    ranks: int = 0
    worst: float = 0.0


def examine(document: dict[str, Any], wanted: str | None = None) -> Verdict:
    """Split, estimate and trace a spec; to be called in its own process, which has no process group.

    Args:
        document: Plain values of a spec.
        wanted: Stop at the first failure of this class; None traces every distinct rank.
    """
    started = time.process_time()
    prepared = prepare(document)
    if isinstance(prepared, Verdict):
        return prepared
    job, budget = prepared
    found = _Found(negative_cells(budget))
    _trace(job, budget, found, wanted)
    failures = tuple(sorted(found.failures, key=lambda failure: -failure.weight))
    outcome = FAILED if failures else OK
    return Verdict(outcome, failures, found.ranks, worst=found.worst, seconds=time.process_time() - started)


def prepare(document: dict[str, Any]) -> Verdict | tuple[Job, Budget]:
    """The plan to trace, or a verdict if the plan cannot be traced."""
    try:
        loaded = check_document(Document(document, SourceMap()))
        job = Job.from_plan(make_plan(loaded.spec))
        budget = build_budget(job.spec, job.inventory, job.layout)
    except MegaplanError as error:
        return Verdict(ILLEGAL, codes=tuple(item.code for item in error.diagnostics if item.severity is Severity.ERROR))
    except Exception as error:
        return Verdict(FAILED, (_crash("estimate", error),))
    try:
        refuse_unbuilt(job.spec)
    except MegaplanError as error:
        notes = {item.code for item in loaded.diagnostics}
        unsaid = [Failure("refused", item.code, said=(item.detail,)) for item in error.diagnostics if item.code not in notes]
        failures = (*negative_cells(budget), *unsaid)
        return Verdict(FAILED if failures else NOTED, failures, codes=tuple(item.code for item in error.diagnostics))
    return job, budget


def _trace(job: Job, budget: Budget, found: _Found, wanted: str | None) -> None:
    warnings.simplefilter("ignore")  # torch warns about its own internals; what matters is in the trace
    import torch  # noqa: PLC0415  (a process that only draws needs none of it)

    from megarun.trace.rank import trace_rank  # noqa: PLC0415
    from random_plans.owners import differing_owners  # noqa: PLC0415

    torch.set_num_threads(1)
    per_stage = job.spec.mesh.world_size // job.spec.mesh.pp
    for rank in choose_ranks(job, budget):
        if wanted is not None and any(failure.key == wanted for failure in found.failures):
            return
        workspace = device_of(spec_on(job.spec, rank // per_stage).device).gemm_workspace.value
        try:
            compared = RankComparison(budget.of_rank(rank), trace_rank(job, rank, workspace_bytes=workspace))
        except Exception as error:
            found.failures.append(_crash("trace", error, rank))
            return  # the process group may be left half open
        found.ranks += 1
        errors = [compared.peak.error, *(pair.error for pair in compared.phases.values())]
        found.worst = max([found.worst, *errors], key=abs)
        for failure, phase, column in past_tolerance(compared):
            said = (*failure.said, *differing_owners(job, compared, phase, column))
            found.failures.append(Failure(failure.kind, failure.where, rank, failure.weight, said))


def negative_cells(budget: Budget) -> list[Failure]:
    """Cells of a budget below 0."""
    return [
        Failure("negative", f"{phase} {column}", rank.ranks[0], 1.0, (f"{phase}, {column}: {size:,} bytes",))
        for rank in budget.ranks
        for phase, cells in rank.cells.items()
        for column, size in cells.items()
        if size < 0
    ]


def past_tolerance(compared: RankComparison) -> list[tuple[Failure, Phase, Column]]:
    """Columns of a rank that are off by more than they may, and phases of which no column is, each with its largest column."""
    peak, rank, found = compared.peak.trace, compared.trace.rank, []
    columns = compared.columns_past_tolerance
    for phase, pair in compared.phases.items():
        own = columns.get(phase, {})
        for column, cell in own.items():
            lines = (_line(f"{phase}, {column}", cell), _line(f"{phase}", pair), _line("peak", compared.peak))
            failure = Failure("column", f"{phase} {column} {_sign(cell)}", rank, abs(cell.difference) / peak, lines)
            found.append((failure, phase, column))
        if not pair.within and not own:
            cells = compared.columns(phase)
            largest = max(cells, key=lambda column: abs(cells[column].difference))
            said = (_line(f"{phase}", pair), _line(f"{phase}, {largest}", cells[largest]))
            found.append((Failure("phase", f"{phase} {_sign(pair)}", rank, abs(pair.difference) / peak, said), phase, largest))
    if not compared.host.within:
        said = (_line("host memory", compared.host),)
        found.append((Failure("host", _sign(compared.host), rank, abs(compared.host.error), said), compared.peak_phase, Column.WORKSPACE))
    if not compared.peak.within and not found:
        phase = compared.peak_phase
        found.append((Failure("peak", _sign(compared.peak), rank, abs(compared.peak.error)), phase, Column.ACTIVATIONS))
    return found


def _sign(pair: Pair) -> str:
    return "under" if pair.difference < 0 else "over"


def _line(what: str, pair: Pair) -> str:
    return f"{what}: estimate {pair.estimate:,}, trace {pair.trace:,}, difference {pair.difference:+,} ({pair.error:+.2%})"


def _crash(what: str, error: Exception, rank: int = -1) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/mega" in frame.filename] or frames
    last = own[-1]
    where = f"{what} {type(error).__name__} at {Path(last.filename).name}:{last.name}"
    text = "\n".join(str(error).splitlines()[:12])
    return Failure("crash", where, rank, 1.0, (text, *"".join(traceback.format_list(frames[-6:])).splitlines()))
