"""`megaplan.search`: the best layouts of a model on a number of devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaplan.api.load import FilePath, LoadedJob, Source, load_to_split, override_texts
from megaplan.diagnostics import refuse
from megaplan.exploration.engine import Explored, Progress, SearchTask, explore
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.gap import loose_terms
from megaplan.exploration.report import LayoutRow, Lost, rows_of, why_not
from megaplan.exploration.robustness import Robustness, robustness
from megaplan.exploration.space import DEFAULT_VARIED, FIXABLE, VARIED, Space
from megaplan.exploration.values import Objective

if TYPE_CHECKING:
    from megaplan.plan.document import PlanDocument

LARGE_GAP = 0.03
OBJECTIVES = ("time", "headroom", "tokens_per_second_per_device")


@dataclass(frozen=True)
class Search:
    """The best layouts, the reasons against the others, and a bound on any layout.

    Attributes:
        job: The spec that the search started from.
        devices: Devices of every layout.
        objective: Objective by which rows are ordered.
        rows: Layouts, best first; empty if none fits.
        complete: True if every layout was considered; False after an interrupt, when the rows are the best so far.
        num_layouts: Legal meshes with a micro-batch; each has the schedules that run on it.
        num_evaluated: Exact evaluations.
        bound_seconds: Lower bound on the modelled step of every legal layout, for any policy and cuts.
        basis: Description of the sources of the times.
    """

    job: LoadedJob
    devices: int
    objective: Objective
    rows: tuple[LayoutRow, ...]
    complete: bool
    num_layouts: int
    num_evaluated: int
    bound_seconds: float
    basis: str
    _explored: Explored
    _evaluator: Evaluator

    @property
    def best(self) -> LayoutRow | None:
        """The first row; None where nothing fits."""
        return self.rows[0] if self.rows else None

    @property
    def gap(self) -> float | None:
        """Difference between the best row's step and the bound, as a share of the bound; None without a row."""
        return self.rows[0].step_seconds / self.bound_seconds - 1 if self.rows and self.bound_seconds else None

    @cached_property
    def gap_reason(self) -> str | None:
        """Names of the loose bounds if the gap is above 3 %; else None."""
        return loose_terms(self._explored) if self.gap is not None and self.gap > LARGE_GAP else None

    @cached_property
    def why_not(self) -> tuple[Lost, ...]:
        """Reasons against each broken rule and against each axis value that the best row does not have."""
        return why_not(self._explored, self._evaluator, self.rows)

    @cached_property
    def robustness(self) -> Robustness:
        """Best row with one efficiency changed by 10 %, or under uneven routing, and the loss of the first row there."""
        return robustness([row.exact for row in self.rows], self._evaluator)

    def plan(self, row: LayoutRow) -> PlanDocument:
        """The plan of a row; `megaplan estimate` of it gives the row's numbers."""
        from megaplan.plan.make import make_plan  # noqa: PLC0415

        return make_plan(row.spec, overrides=(*self.job.changes, *row.changes))

    def write(self, folder: FilePath) -> tuple[str, ...]:
        """Write a plan file for each row into a folder, which is created if it does not exist.

        Returns:
            The paths, best first: `NAME-1.json` and so on.

        Raises:
            OSError: One cannot be written.
        """
        from megaplan.plan.make import plan_text  # noqa: PLC0415

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, row in enumerate(self.rows, 1):
            path = target / f"{self.job.spec.name}-{number}.json"
            path.write_text(plan_text(self.plan(row)), encoding="utf-8")
            paths.append(os.fspath(path))
        return tuple(paths)


def search(
    source: Source,
    /,
    *changes: str,
    devices: int | None = None,
    fix: Sequence[str] | Mapping[str, Any] = (),
    vary: Sequence[str] = DEFAULT_VARIED,
    objective: Objective = "time",
    headroom_bytes: int = 0,
    top: int = 10,
    processes: int | None = None,
    device_file: FilePath | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    **overrides: Any,
) -> Search:
    """Find the layouts of a model with the best modelled step on a number of devices.

    The global batch, the sequence length and the model stay fixed. The search covers pp, tp, cp, ep, etp, both parts of dp, resharding,
    vocabulary sharding and optimizer sharding, and, as `vary` says, schedule with vpp, micro-batch, recompute by family, gradient
    precision and kernels. Among the cuts that fit, those with the least time of the busiest slot, or rank, are chosen.

    Args:
        source: A spec: a path, a mapping, or a job that was loaded.
        *changes: `KEY=VALUE` texts for the spec.
        devices: Devices of a layout; the spec's if None.
        fix: Keys that keep a value: `["mesh.tp=8"]`, or a mapping.
        vary: Settings that may differ from the spec: any of `recompute`, `schedule`, `batch`, `precision` and `kernels`.
        objective: Objective by which rows are ordered; with the batch kept, tokens per second order rows as time does.
        headroom_bytes: Bytes that stay free on every rank.
        top: Number of rows to return.
        processes: Number of worker processes; as many as processors if None. The result does not depend on it.
        device_file: Device file, as in `megaplan.load`.
        report: Callback for progress.
        **overrides: Changes as keywords: `batch__seq_length=8192`.

    Returns:
        The result; after an interrupt, with the best rows so far.

    Raises:
        MegaplanError: Every error of the source and the changes; an unknown key of `fix`, word of `vary` or objective (MP489).
        TypeError: The same as for `megaplan.load`.

    Examples:
        >>> import megaplan
        >>> found = megaplan.search("plans/tiny-hybrid-pp2.yaml", devices=2, top=3)
        >>> found.complete, len(found.rows), found.best.exact.layout.num_microbatches > 0
        (True, 3, True)
        >>> found.bound_seconds <= found.best.step_seconds
        True
    """
    if objective not in OBJECTIVES:
        raise refuse("MP489", f"objective = {objective}", *(f"--objective {name}" for name in OBJECTIVES))
    if unknown := [word for word in vary if word not in VARIED]:
        raise refuse("MP489", f"--vary {unknown[0]}, and its words are {', '.join(VARIED)}", f"--vary {','.join(DEFAULT_VARIED)}")
    job = load_to_split(source, [*changes, *override_texts(overrides)], None, device_file)
    if job.spec.host.kind.floors is None:
        detail = f"host.name = {job.spec.host.kind.name}: a search varies keys of other hosts; its estimates are of one layout at a time"
        raise refuse("MP489", detail, "megaplan estimate SPEC", "--set 'host={name: megarun}'")
    world = job.spec.mesh.world_size if devices is None else devices
    if world < 1 or top < 1:
        raise refuse("MP489", f"--devices {world}, --top {top}: both are at least 1", "--devices 8 --top 10")
    space = Space(job.spec, world, _fixed(job, fix), vary)
    task = SearchTask(space, objective, headroom_bytes, top)
    explored = explore(task, processes or os.cpu_count() or 1, report)
    evaluator = task.evaluator()
    rows = rows_of(explored, evaluator)
    bound = explored.bound_ns / 1e9
    return Search(
        *(job, world, objective, rows, explored.complete, len(explored.bounds), explored.num_evaluated, bound),
        *(evaluator.side(space.base).clock.basis, explored, evaluator),
    )


def _fixed(job: LoadedJob, fix: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of `FIXABLE`.

    Raises:
        MegaplanError: MP489, a key that a search does not decide, or a text that is not KEY=VALUE.
    """
    from megaplan.spec.document import resolve_scalar  # noqa: PLC0415

    pairs: list[tuple[str, Any]] = list(fix.items()) if isinstance(fix, Mapping) else []
    for text in () if isinstance(fix, Mapping) else fix:
        key, separator, value = text.partition("=")
        if not separator:
            raise refuse("MP489", f"--fix {text} is not KEY=VALUE", "--fix mesh.tp=8")
        pairs.append((key.strip(), resolve_scalar(value.strip())))
    found = {}
    for key, value in pairs:
        if key not in FIXABLE:
            keys = ", ".join(FIXABLE)
            raise refuse("MP489", f"--fix {key}={value}: a search decides {keys}", f"--set {key}={value}", file=job.name)
        found[FIXABLE[key]] = value
    return found
