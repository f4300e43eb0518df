"""`megaplan.search`: the best layouts of a model on a number of devices."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaplan.api.batch import one_by_one, open_batch
from megaplan.api.load import FilePath, LoadedJob, Source, load, load_to_split, override_texts
from megaplan.diagnostics import refuse
from megaplan.exploration.engine import Explored, Progress, SearchTask, Stop, explore
from megaplan.exploration.evaluate import Evaluator
from megaplan.exploration.fewest import FewestDevices, fewest_devices
from megaplan.exploration.gap import loose_terms
from megaplan.exploration.report import LayoutRow, Lost, changes_of, cuts_of_row, rows_of, why_not
from megaplan.exploration.robustness import Robustness, robustness
from megaplan.exploration.space import DEFAULT_VARIED, FIXABLE, VARIED, Space
from megaplan.exploration.values import Objective
from megaplan.layout.build import build_layout
from megaplan.results import Picture, Result, Row
from megaplan.spec.pools import device_counts, uneven_pools
from megaplan.spec.read import STDIN, display_name

if TYPE_CHECKING:
    from megaplan.plan.document import PlanDocument

LARGE_GAP = 0.03
LAUNCHES = {"megatron": ".sh"}
"""Suffix of a host's launch file."""
SECONDS = 20.0
"""Default time limit of a search."""
OBJECTIVES = ("time", "headroom", "tokens_per_second_per_device")


@dataclass(frozen=True, repr=False)
class Search(Result):
    """The best layouts, the reasons against the others, and a bound on any layout.

    Attributes:
        job: The spec that the search started from.
        devices: Devices of every layout.
        objective: Objective by which rows are ordered.
        rows: Layouts, best first; empty if none fits.
        stopped: Empty if every layout was considered; else the reason to stop early: `time`, `interrupt`, or `gap` (the first row is within
            1 % of the bound).
        seconds: Time limit; None for none.
        num_layouts: Legal meshes with a micro-batch; each has the schedules that run on it.
        num_evaluated: Exact evaluations.
        bound_seconds: Lower bound on the modelled step of every legal layout, for any policy and cuts.
        basis: Description of the sources of the times.
    """

    job: LoadedJob
    devices: int
    objective: Objective
    rows: tuple[LayoutRow, ...]
    stopped: Stop
    seconds: float | None
    num_layouts: int
    num_evaluated: int
    bound_seconds: float
    basis: str
    _explored: Explored
    _evaluator: Evaluator

    def _summary(self) -> Sequence[str]:
        spec, state = self.job.spec, "" if self.complete else f"; the best so far ({self.stopped})"
        tried = f"{self.num_layouts:,} meshes, {self.num_evaluated:,} exact evaluations{state}"
        best = self.rows[0]._summary() if self.rows else ("nothing fits",)
        proof = "" if self.gap is None else f", at most {100 * self.gap:.1f} % slower than the best"
        return (f"{spec.name} on {self.devices_text}", f"best: {best[0]}", *best[1:], f"{tried}{proof}")

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "step_seconds": row.step_seconds,
                "tokens_per_second_per_device": row.tokens_per_second_per_device,
                "mfu_share": row.mfu,
                "peak_bytes": row.peak_bytes,
                "headroom_bytes": row.headroom_bytes,
                "mesh": row.spec.mesh.degrees_text,
                "micro_batch": row.exact.layout.micro_batch,
                "schedule": row.exact.layout.kind,
            }
            for row in self.rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document that `megaplan search --json` prints without `-o`."""
        from megaplan.api.search_json import search_document  # noqa: PLC0415

        return search_document(self, ())

    def plot(self) -> Picture:
        """The rows by step and peak; rows that no other one matches in both are filled."""
        from megaplan.api.search_picture import search_svg  # noqa: PLC0415

        return Picture(search_svg(self._rows(), [row.pareto for row in self.rows]))

    @property
    def devices_text(self) -> str:
        """`16 x h100-sxm`, or with pools how many are of each type."""
        return " + ".join(f"{count:,} x {device.name}" for count, device in device_counts(self.job.spec, self.devices))

    @property
    def complete(self) -> bool:
        """True if every layout was considered, so that no other layout can be among the rows."""
        return not self.stopped

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
    def not_looked_at(self) -> dict[int, int]:
        """Meshes that may have better layouts and were not explored, by number of pipeline ranks."""
        return dict(sorted(self._explored.not_looked_at.items()))

    @cached_property
    def fewest(self) -> FewestDevices | None:
        """If no layout fits: the smallest tried number of devices on which one fits, with its row."""
        return None if self.rows else fewest_devices(self._explored.task, self._explored.answer_ends())

    def command(self, row: LayoutRow) -> str:
        """The command that prints a row's step and memory: one line for a shell."""
        return estimate_command(self.job, row)

    @cached_property
    def robustness(self) -> Robustness:
        """Best row with one efficiency changed by 10 %, or under uneven routing, and the loss of the first row there."""
        return robustness([row.exact for row in self.rows], self._evaluator, self._explored.answer_ends())

    def plan(self, row: LayoutRow) -> PlanDocument:
        """The plan of a row; `megaplan estimate` of it gives the row's numbers."""
        from megaplan.plan.make import make_plan  # noqa: PLC0415

        return make_plan(row.spec, overrides=(*self.job.changes, *row.changes))

    def write(self, folder: FilePath) -> tuple[str, ...]:
        """Write a plan file for each row into a folder, which is created if it does not exist; under another host also its launch.

        Returns:
            The paths of the plans, best first: `NAME-1.json` and so on; then the paths of launches, such as `NAME-1.sh` for host megatron.

        Raises:
            OSError: One cannot be written.
        """
        from megaplan.plan.make import plan_text  # noqa: PLC0415

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        paths, launches = [], []
        for number, row in enumerate(self.rows, 1):
            path = target / f"{self.job.spec.name}-{number}.json"
            path.write_text(plan_text(self.plan(row)), encoding="utf-8")
            paths.append(os.fspath(path))
            if self.job.spec.host.kind.export is not None:
                launches.append(os.fspath(self._write_launch(row, path)))
        return (*paths, *launches)

    def _write_launch(self, row: LayoutRow, plan: Path) -> Path:
        """The launch of a row's host, in a file that has the plan's name."""
        from megaplan.exporters.values import Source as Exported  # noqa: PLC0415

        spec, host = row.spec, row.spec.host.kind
        inventory = self._evaluator.side(spec).inventory
        text = host.export(Exported(spec, inventory, build_layout(spec, inventory, row.exact.spans))).text if host.export else ""
        path = plan.with_suffix(LAUNCHES.get(host.name, f".{host.name}.json"))
        path.write_text(text, encoding="utf-8")
        return path


def search(
    source: Source,
    /,
    *changes: str,
    devices: int | None = None,
    global_batch: int | None = None,
    fix: Sequence[str] | Mapping[str, Any] = (),
    vary: Sequence[str] = DEFAULT_VARIED,
    objective: Objective = "time",
    headroom_bytes: int = 0,
    top: int = 10,
    processes: int | None = None,
    seconds: float | None = SECONDS,
    device_file: FilePath | None = None,
    report: Callable[[Progress], None] = lambda _: None,
    **overrides: Any,
) -> Search:
    """Find the layouts of a model with the best modelled step on a number of devices.

    The global batch, the sequence length and the model stay fixed. The search covers pp, tp, cp, ep, etp, both parts of dp, resharding,
    vocabulary sharding and optimizer sharding, and, as `vary` says, schedule with vpp, micro-batch, recompute by family, gradient
    precision and kernels. Among the cuts that fit, it chooses those with the shortest time of the slowest slot (or rank); with pairs in
    turns, those with the shortest step. `pools` keep their devices and their order; the number of pipeline ranks of a layout must divide
    each pool into whole stages.

    Args:
        source: A spec: a path, a mapping, or a job that was loaded.
        *changes: `KEY=VALUE` texts for the spec.
        devices: Devices of a layout; the spec's if None.
        global_batch: Sequences of a step; the spec's if None. A model's config states none, and has 4 for each device then.
        fix: Keys that keep a value: `["mesh.tp=8"]`, or a mapping.
        vary: Settings that may differ from the spec: any of `recompute`, `schedule`, `batch`, `precision` and `kernels`.
        objective: Objective by which rows are ordered; with the batch kept, tokens per second order rows as time does.
        headroom_bytes: Bytes that stay free on every rank.
        top: Number of rows to return.
        processes: Number of worker processes; as many as processors if None. The result of a complete search does not depend on it.
        seconds: Time limit, after which the best rows so far are returned; None for a search that ends with a proof. A search with a limit
            also ends once its first row is within 1 % of the bound.
        device_file: Device file, as in `megaplan.load`.
        report: Callback for progress.
        **overrides: Changes as keywords: `batch__seq_length=8192`.

    Returns:
        The result; `complete` says whether every layout was considered.

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
        raise refuse("MP489", f"--vary {unknown[0]}, but its values are {', '.join(VARIED)}", f"--vary {','.join(DEFAULT_VARIED)}")
    job = load_to_split(source, [*changes, *override_texts(overrides)], None, device_file)
    if job.spec.host.kind.floors is None:
        detail = f"host.name = {job.spec.host.kind.name}: a search varies keys of other hosts; its estimates are of one layout at a time"
        raise refuse("MP489", detail, "megaplan estimate SPEC", "--set 'host={name: megarun}'")
    world = job.spec.mesh.world_size if devices is None else devices
    _check_limits(job, world, top, seconds)
    batch, notes = open_batch(job, world, global_batch)
    if batch is not None:
        job = replace(load(job, *one_by_one(job, batch)), read_diagnostics=notes)
    space = Space(job.spec, world, _fixed(job, fix), vary)
    task = SearchTask(space, objective, headroom_bytes, top, seconds)
    explored = explore(task, processes or os.cpu_count() or 1, report)
    evaluator = task.evaluator()
    rows = rows_of(explored, evaluator)
    bound = explored.bound_ns / 1e9
    return Search(
        *(job, world, objective, rows, explored.stopped, seconds, len(explored.bounds), explored.num_evaluated, bound),
        *(evaluator.side(space.base).clock.basis, explored, evaluator),
    )


def _check_limits(job: LoadedJob, devices: int, top: int, seconds: float | None) -> None:
    """Checks the numbers of a search.

    Raises:
        MegaplanError: MP489, a number is not positive; MP509: a pool has too few devices for one stage.
    """
    if devices < 1 or top < 1:
        raise refuse("MP489", f"--devices {devices}, --top {top}: both are at least 1", "--devices 8 --top 10")
    for key, detail, hint in uneven_pools(
        job.spec, devices, devices
    ):  # the number of stages stays the same only if no stage is left for `device`
        raise refuse("MP509", detail, hint, "pools: []", key=key)
    if seconds is not None and not 0 < seconds < float("inf"):
        raise refuse("MP489", f"--seconds {seconds:g}: a time limit is above 0", "--seconds 20", "--exhaust")


def estimate_command(job: LoadedJob, row: LayoutRow) -> str:
    """The command that prints a row's step and memory, with the changes of the job and of the row."""
    base = set(changes_of(job.spec))
    own = [text for text in row.decisions if text not in base] + list(cuts_of_row(row))
    read = set(changes_of(load(job, *own).spec))  # a default that follows from other keys may differ there
    own += [text for text in changes_of(row.spec) if text not in read]
    decided = {text.partition("=")[0] for text in own}
    texts = [*(text for text in job.changes if text.partition("=")[0].strip() not in decided), *own]
    name = "-" if job.name == display_name(STDIN) else job.name
    return shlex.join(["megaplan", "estimate", name, *(word for text in texts for word in ("--set", text))])


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
