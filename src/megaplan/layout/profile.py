"""A device's measured constants (`megaplan.measured`) from profiled steps: shares of each kind of kernels, and launch times of the host.

Kernels of a profile are assigned to families by name, and the kinds of kernels in a family are counted for the run's
spec. A kind's share is its counted floor over its measured time without launches. Over several runs it is the mean of the logarithms,
weighted by the family's share of its step; if a family holds several kinds, the shares with the least squares. The host's two constants
minimise the difference between modelled waits and the steps' time beyond the device's busy time.

A run that was not profiled, or is of results that are held out, is in no constant. The step of each other run is also modelled without it;
constants that no other run has stay. The interval follows from the errors of all these steps.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, fsum, log, sqrt
from typing import Any, NamedTuple

from megakernels.facts import MEMORY, PRODUCT
from megaplan.cost.kinds import at_peak, kind_counts
from megaplan.cost.rates import LINEARS, rates_with
from megaplan.cost.replay import ReplayTimer
from megaplan.devices import load_device
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.layout.changed import changes_of
from megaplan.layout.references import REFERENCES
from megaplan.layout.step_time import dtype_of, mode_of
from megaplan.measured.constants import FORMAT, Counts, of_document
from megaplan.measured.kernels import seen_by_step
from megaplan.spec.models import Spec
from megaplan.spec.step_graphs import replays_graphs

SMALLEST = ("pow_tensor_scalar", "CUDAFunctor_add<double>")
"""Kernels of one element, whose time is the launch itself."""
NORMAL_QUANTILE = 1.2816
"""Normal quantile: 80 % are within this many deviations."""
SECTIONS, SWEEPS, WIDEST = 40, 12, 2.5
"""Limits of the search for shares of one family: steps, sweeps, and the distance of their logarithms from the mean."""
LARGEST_NS, STEP_NS = 200_000, 1_000
"""Largest launch time of a host that the search for its constants tries, and the search's steps."""
PRIOR = 0.02
"""Weight of the mean of all rows for each share of several in one family, relative to rows with a total weight of 1."""


class TrainedPlan(NamedTuple):
    """The plan that a run trained."""

    spec: Spec
    inventory: Inventory
    spans: Spans


class KindCount(NamedTuple):
    """Counts of a kind in a run: milliseconds at the peaks, launches, and dependent steps."""

    floor: float
    launches: int
    steps: int


class FamilyRow(NamedTuple):
    """A family in a run.

    Attributes:
        run: Name of the run.
        milliseconds: Measured milliseconds.
        weight: Share of the run's step.
        counts: Counts of each kind in it.
    """

    run: str
    milliseconds: float
    weight: float
    counts: dict[str, KindCount]


class Fit(NamedTuple):
    """Constants from some runs."""

    shares: dict[str, float]
    steps: dict[str, float]
    spreads: dict[str, float]


def counts_of(task: TrainedPlan) -> dict[tuple[str, str], KindCount]:
    """Kinds of a run's step, by name and letter of the pass."""
    found: dict[tuple[str, str], KindCount] = {}
    for letter, part, ns in ReplayTimer(task.inventory, task.spec, at_peak).kinds(task.spec):
        before = found.get((part.kind, letter), KindCount(0.0, 0, 0))
        found[part.kind, letter] = KindCount(before.floor + ns / 1e6, before.launches + part.launches, before.steps + part.steps)
    return found


def rows_of(run: Mapping[str, Any], task: TrainedPlan) -> list[FamilyRow]:
    """The families of a profiled run."""
    counts = counts_of(task)
    taken: dict[tuple[tuple[str, ...], str | None], float] = {}
    for family, time in seen_by_step(run["gpu"]).items():
        if family is not None:
            taken[family.kinds, family.letter] = taken.get((family.kinds, family.letter), 0.0) + time.milliseconds
    found = []
    for (kinds, letter), milliseconds in taken.items():
        each: dict[str, KindCount] = {}
        for (kind, place), count in counts.items():
            if kind in kinds and (letter is None or place in (letter, "")):
                before = each.get(kind, KindCount(0.0, 0, 0))
                each[kind] = KindCount(before.floor + count.floor, before.launches + count.launches, before.steps + count.steps)
        if each:
            found.append(FamilyRow(run["run"], milliseconds, milliseconds / 1e3 / run["step_s"], each))
    return found


def fit(rows: Sequence[FamilyRow], launch: float) -> Fit:
    """Shares and steps of the kinds in these rows; `launch` is in milliseconds."""
    joined: list[tuple[set[str], list[FamilyRow]]] = []
    for row in rows:
        kinds, own = set(row.counts), [row]
        for other in [each for each in joined if each[0] & kinds]:
            joined.remove(other)
            kinds, own = kinds | other[0], other[1] + own
        joined.append((kinds, own))
    shares, steps, spreads = dict[str, float](), dict[str, float](), dict[str, float]()
    for kinds, own in joined:
        if any(count.steps for row in own for count in row.counts.values()):
            (kind,) = kinds
            each = [(row.milliseconds - row.counts[kind].launches * launch) / row.counts[kind].steps * 1e6 for row in own]
            steps[kind] = exp(_mean([log(one) for one in each], own))
            spreads[kind] = _spread([log(one) for one in each], own)
            continue
        found = _shares(sorted(kinds), own, launch)
        errors = [log(_modelled(row, found, launch) / row.milliseconds) for row in own]
        shares |= found
        for kind in kinds:
            with_kind = [(error, row) for error, row in zip(errors, own, strict=True) if kind in row.counts]
            spreads[kind] = sqrt(_mean([error**2 for error, _ in with_kind], [row for _, row in with_kind]))
    return Fit(shares, steps, spreads)


def _shares(kinds: list[str], rows: list[FamilyRow], launch: float) -> dict[str, float]:
    """Shares that minimise the weighted sum of squared logarithms, by coordinate descent."""
    start = exp(_mean([log(sum(c.floor for c in row.counts.values()) / _busy(row, launch)) for row in rows], rows))
    found = dict.fromkeys(kinds, start)
    total = sum(row.weight for row in rows)

    def cost(kind: str, at: float) -> float:
        tried = found | {kind: exp(at)}
        squares = sum(row.weight / total * log(_modelled(row, tried, launch) / row.milliseconds) ** 2 for row in rows)
        return squares + (PRIOR * (at - log(start)) ** 2 if len(kinds) > 1 else 0.0)

    for _ in range(SWEEPS if len(kinds) > 1 else 1):
        for kind in kinds:
            found[kind] = exp(_least(partial(cost, kind), log(start) - WIDEST, min(0.0, log(start) + WIDEST)))
    return found


def _busy(row: FamilyRow, launch: float) -> float:
    """Measured time without launches; a profile with less time than its launches implies that they are cheaper."""
    return max(row.milliseconds - launch * sum(count.launches for count in row.counts.values()), row.milliseconds / 2)


def _modelled(row: FamilyRow, shares: Mapping[str, float], launch: float) -> float:
    return sum(count.floor / shares[kind] + count.launches * launch for kind, count in row.counts.items())


def _mean(values: Sequence[float], rows: Sequence[FamilyRow]) -> float:
    return sum(value * row.weight for value, row in zip(values, rows, strict=True)) / sum(row.weight for row in rows)


def _spread(values: Sequence[float], rows: Sequence[FamilyRow]) -> float:
    middle = _mean(values, rows)
    return sqrt(_mean([(value - middle) ** 2 for value in values], rows))


def constants(
    results: Mapping[str, Any],
    tasks: Mapping[str, TrainedPlan],
    held_out: Sequence[tuple[str, float, TrainedPlan]] = (),
    changed: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The document of measured constants.

    Args:
        results: Device, versions, `copy_gb_s` and `runs` with `step_s`; of profiled ones `gpu` with `busy_ms` and `by_kernel`.
        tasks: Trained plan of each run, by its name.
        held_out: Label, seconds of the step and trained plan of each run of other results.
        changed: Kernels that changed since then, in the form that `changed.changes_of` accepts; the figures of runs and the interval do not
            depend on them.
    """
    runs = [run for run in results["runs"] if run.get("gpu")]
    device = next(iter(tasks.values())).spec.device.name
    launch = _launch_ms(runs)
    rows = {run["run"]: rows_of(run, tasks[run["run"]]) for run in runs}
    found = fit([row for each in rows.values() for row in each], launch)
    reached = results["copy_gb_s"] * 1e9 / load_device(device).memory_bandwidth.value
    about = {key: str(results[key]) for key in ("device", "torch", "triton", "python", "date", "commit", "mode")}
    counts = kind_counts(REFERENCES)
    document: dict[str, Any] = {"format": FORMAT, "device": device, "about": about, "references": list(REFERENCES)}
    document["modes"] = sorted({mode_of(tasks[run["run"]].spec) for run in runs})
    document["dtypes"] = sorted({dtype_of(tasks[run["run"]].spec) for run in runs})
    document |= _document(found, launch, reached, rows, counts)
    profiled = {run["run"]: run for run in runs}
    document["host"] = _host(document, profiled, tasks)

    def without(name: str) -> float:
        rest = fit([row for other, each in rows.items() if other != name for row in each], launch)
        again = Fit(found.shares | rest.shares, found.steps | rest.steps, found.spreads)
        changed = document | _document(again, launch, reached, rows, counts)
        changed["host"] = _host(changed, {other: run for other, run in profiled.items() if other != name}, tasks)
        return _step(changed, tasks[name])

    others = [run for run in results["runs"] if not run.get("gpu") and not run.get("expandable_segments")]
    steps = [(run["run"], run["step_s"], tasks[run["run"]]) for run in [*runs, *others]] + [*held_out]
    document["runs"] = {
        label: {
            "measured": round(seconds, 4),
            "modelled": round(modelled := _step(document, task), 4),
            "without it": round(without(label) if label in profiled else modelled, 4),
        }
        for label, seconds, task in steps
    }
    document["interval"] = _interval(document["runs"])
    if changed:
        document["changed"] = {kind: each for kind, each in changes_of(changed, runs).items() if kind in document["kinds"]}
    return document


def _interval(runs: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Ratios of measured to modelled steps between which 80 % are, from the errors of steps that are modelled without themselves."""
    errors = [log(row["measured"] / row["without it"]) for row in runs.values()]
    wide = quantile(len(errors)) * sqrt(sum(error**2 for error in errors) / len(errors))
    return [round(exp(-wide), 4), round(exp(wide), 4)]


def quantile(freedom: int) -> float:
    """Deviations within which 80 % of Student's distribution are.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5, two terms: 1.439 for six degrees of freedom, exactly 1.440.
    """
    z = NORMAL_QUANTILE
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _document(
    found: Fit, launch: float, reached: float, rows: Mapping[str, Sequence[FamilyRow]], counts: Mapping[str, Counts]
) -> dict[str, Any]:
    """The part of a file that comes from profiles."""
    by_kind: dict[str, dict[str, list[float]]] = {}
    for run, each in rows.items():
        for row in each:
            for kind, count in row.counts.items():
                before = by_kind.setdefault(kind, {}).get(run, [0.0, 0.0])
                by_kind[kind][run] = [round(before[0] + count.floor, 3), round(before[1] + row.milliseconds, 3)]
    kinds: dict[str, dict[str, Any]] = {}
    for kind in sorted(found.spreads):
        value = {"share": round(found.shares[kind], 4)} if kind in found.shares else {"step_ns": round(found.steps[kind])}
        kinds[kind] = value | {
            "spread": round(found.spreads[kind], 4),
            "counts": list(counts.get(kind, Counts(0, 0, 0))),
            "runs": by_kind[kind],
        }
    kinds[MEMORY] = {"share": round(reached, 4), "spread": 0.0, "counts": list(counts.get(MEMORY, Counts(0, 0, 0))), "runs": {}}
    percent = {part: round(100 * found.shares[PRODUCT]) for part in sorted(LINEARS)} | {"memory": round(100 * reached)}
    return {
        "launch_ns": round(launch * 1e6),
        "percent": percent,
        "kinds": kinds,
        "host": {"issue_ns": 0, "update_ns": 0},
        "interval": [1.0, 1.0],
        "runs": {},
    }


def _launch_ms(runs: Sequence[Mapping[str, Any]]) -> float:
    small = [kernel for run in runs for kernel in run["gpu"]["by_kernel"] if any(name in kernel[0] for name in SMALLEST)]
    return float(sum(kernel[2] for kernel in small) / sum(kernel[1] for kernel in small))


def _timer(document: Mapping[str, Any], task: TrainedPlan) -> ReplayTimer:
    found = of_document(document)
    return ReplayTimer(task.inventory, task.spec, lambda rates: rates_with(rates, found))


def _step(document: Mapping[str, Any], task: TrainedPlan) -> float:
    return _timer(document, task).step_ns(task.spec, task.spans) / 1e9


def _host(document: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]], tasks: Mapping[str, TrainedPlan]) -> dict[str, int]:
    """Nanoseconds of a launch and of an operation of the update.

    A step with CUDA graphs waits for its host only in the update. So profiled steps with graphs give the second number, if there are any,
    and eager steps the first.
    """
    gaps: list[tuple[ReplayTimer, Spec, Any, float, float]] = []
    for name, run in runs.items():
        task = tasks[name]
        timer = _timer(document, task)
        gaps.append((timer, task.spec, timer.sums(task.spec), run["step_s"] * 1e9 - run["gpu"]["busy_ms"] * 1e6, run["step_s"] * 1e9))
    replayed = [gap for gap in gaps if replays_graphs(gap[1])]
    eager = [gap for gap in gaps if not replays_graphs(gap[1])]

    def cost(those: Sequence[tuple[ReplayTimer, Spec, Any, float, float]], issue: int, update: int) -> float:
        return fsum(((timer.host_ns(spec, sums, issue, update) - gap) / step) ** 2 for timer, spec, sums, gap, step in those)

    grid = range(0, LARGEST_NS, STEP_NS)
    if not replayed:
        issue, update = min(((one, two) for one in grid for two in grid), key=lambda pair: cost(eager, *pair))
        return {"issue_ns": issue, "update_ns": update}
    update = min(grid, key=lambda each: cost(replayed, 0, each))
    return {"issue_ns": min(grid, key=lambda each: cost(eager, each, update)), "update_ns": update}


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Position of the minimum of a unimodal cost, by golden sections."""
    ratio = (5**0.5 - 1) / 2
    for _ in range(SECTIONS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if cost(left) < cost(right) else (left, high)
    return (low + high) / 2


def text_of(document: Mapping[str, Any]) -> str:
    """The file, one line per constant."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict) and key in ("kinds", "runs", "changed"):
            inner = ",\n".join(f"    {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{inner}\n  }}")
        elif key == "references":
            inner = ",\n".join(f"    {json.dumps(each)}" for each in value)
            lines.append(f"  {json.dumps(key)}: [\n{inner}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
