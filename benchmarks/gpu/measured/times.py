"""The profiled steps of a results file, compared with the step-time model part by part.

`rows(results)` gives the parts, `steps(results)` the steps; `table` and `step_table` make Markdown of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpu.measured.results import SPECS, kept_model

import megaplan
from megaplan.api.profiled import label_of
from megaplan.cost.rates import Rates, rates_with
from megaplan.cost.replay import ReplayTimer
from megaplan.layout.profile import TrainedPlan, counts_of
from megaplan.measured.constants import profiled
from megaplan.measured.kernels import FAMILIES, seen_by_step

LEAST = 0.03
"""Share of a step from which a part must be right."""
FAR = 0.1
"""Error from which a part of results that are in no constant is shown."""
OTHER, HOST = "other", "host gap"


class GroupRow(NamedTuple):
    """One part of one run.

    Attributes:
        run: Name of the run.
        group: The part.
        measured_ms: Measured time of the part in the profiled step.
        modelled_ms: Time of the part by the model.
        floor_ms: Counted, at the device's peaks; 0 where nothing is counted.
        share: Measured, of the step.
        error: Modelled over measured less 1; None below a hundredth of the step.
    """

    run: str
    group: str
    measured_ms: float
    modelled_ms: float
    floor_ms: float
    share: float
    error: float | None


class StepRow(NamedTuple):
    """One run's step in seconds; `without` is modelled by constants that the run had no part in, where other runs have them."""

    run: str
    measured: float
    modelled: float
    low: float
    high: float
    without: float
    profiled: bool


def rows(results: Mapping[str, Any]) -> list[GroupRow]:
    """The parts of every profiled run, longest first; as modelled at the time where the results keep that."""
    if (kept := kept_model(results)) is not None:
        return [GroupRow(*row) for row in kept["parts"]]
    found = []
    for run in results["runs"]:
        if run.get("gpu"):
            found += _rows_of(run)
    return found


def steps(results: Mapping[str, Any]) -> list[StepRow]:
    """Every run, of two with different allocators the one of the default; as modelled at the time where the results keep that."""
    if (kept := kept_model(results)) is not None:
        return [StepRow(*row) for row in kept["steps"]]
    found = []
    default = {run["run"] for run in results["runs"] if not run.get("expandable_segments")}
    for run in results["runs"]:
        if run.get("expandable_segments") and run["run"] in default:
            continue
        task = task_of(run)
        seconds = ReplayTimer(task.inventory, task.spec, as_profiled).step_ns(task.spec, task.spans) / 1e9
        constants = profiled(task.spec.device.name)
        assert constants is not None
        low, high = constants.interval
        without = constants.runs.get(label_of(run), {}).get("without it", seconds)
        found.append(StepRow(label_of(run), run["step_s"], seconds, low * seconds, high * seconds, without, bool(run.get("gpu"))))
    return found


def as_profiled(rates: Rates) -> Rates:
    """The rates of the kernels that were profiled: some have become faster since."""
    found = profiled(rates.device.name)
    return rates if found is None else rates_with(rates, found)


def task_of(run: Mapping[str, Any]) -> TrainedPlan:
    """The plan that a run trained."""
    job = megaplan.load(str(SPECS / f"{run['run']}.yaml"), *run.get("overrides", ()))
    return TrainedPlan(job.spec, job.inventory, job.spans)


def _rows_of(run: Mapping[str, Any]) -> list[GroupRow]:
    name, step, task = label_of(run), 1e3 * run["step_s"], task_of(run)
    timer = ReplayTimer(task.inventory, task.spec, as_profiled)
    labels = _labels()
    taken: dict[str, float] = {}
    for family, time in seen_by_step(run["gpu"]).items():
        label = OTHER if family is None else labels[family.kinds[0], family.letter]
        taken[label] = taken.get(label, 0.0) + time.milliseconds
    shown = sum(kernel[2] for kernel in run["gpu"]["by_kernel"])
    taken[OTHER] = taken.get(OTHER, 0.0) + run["gpu"]["sum_ms"] - shown  # kernels that the file does not list
    modelled: dict[str, float] = {}
    for letter, part, ns in timer.kinds(task.spec):
        label = labels.get((part.kind, letter)) or labels.get((part.kind, None)) or OTHER
        modelled[label] = modelled.get(label, 0.0) + ns / 1e6
    floors: dict[str, float] = {}
    for (kind, letter), count in counts_of(task).items():
        label = labels.get((kind, letter)) or labels.get((kind, None)) or OTHER
        floors[label] = floors.get(label, 0.0) + count.floor
    taken[HOST], modelled[HOST] = step - run["gpu"]["busy_ms"], timer.terms(task.spec, task.spans)["host"] / 1e6
    return [
        GroupRow(name, label, ms, modelled.get(label, 0.0), floors.get(label, 0.0), ms / step, _error(ms, modelled.get(label, 0.0), step))
        for label, ms in sorted(taken.items(), key=lambda item: -item[1])
        if ms or modelled.get(label)
    ]


def _error(taken: float, modelled: float, step: float) -> float | None:
    return modelled / taken - 1 if taken > step / 100 else None


def _labels() -> dict[tuple[str, str | None], str]:
    """The part of each kind and letter: families with one group or the same kinds are one part; the empty letter is outside passes."""
    by_kinds: dict[tuple[tuple[str, ...], str | None], list[str]] = {}
    for family in FAMILIES:
        groups = by_kinds.setdefault((family.kinds, family.letter), [])
        if family.group not in groups:
            groups.append(family.group)
    found = {(kind, letter): ", ".join(groups) for (kinds, letter), groups in by_kinds.items() for kind in kinds}
    outside = {(kind, ""): label for (kind, letter), label in found.items() if letter is not None and (kind, None) not in found}
    return outside | found


def step_table(found: Sequence[StepRow]) -> list[str]:
    """Markdown of the steps."""
    lines = ["| run | measured s | modelled s | error | 80 % interval | without this run |", "|---|--:|--:|--:|---|--:|"]
    for row in found:
        name = row.run if row.profiled else f"{row.run} (not profiled, in no constant)"
        error, without = (100 * (value / row.measured - 1) for value in (row.modelled, row.without))
        lines.append(
            f"| {name} | {row.measured:.3f} | {row.modelled:.3f} | {error:+.1f} % | {row.low:.3f} to {row.high:.3f} | {without:+.1f} % |"
        )
    return lines


def table(found: Iterable[GroupRow], least: float = 0.01) -> list[str]:
    """Markdown of the parts that are at least `least` of their step."""
    lines = ["| run | part | measured ms | modelled ms | counted floor ms | error |", "|---|---|--:|--:|--:|--:|"]
    for row in found:
        if abs(row.share) < least:
            continue
        floor = f"{row.floor_ms:.1f}" if row.floor_ms else ""
        error = "" if row.error is None else f"{100 * row.error:+.0f} %"
        lines.append(f"| {row.run} | {row.group} | {row.measured_ms:.1f} | {row.modelled_ms:.1f} | {floor} | {error} |")
    return lines
