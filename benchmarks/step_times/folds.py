"""Cross-validation by groups, error tables, intervals and ranking."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaplan.cost.step.fitted import FAR, NEAR, FittedTuple, is_near, tuple_of
from step_times.fitting import Fit, fit, left_out, predict, row_weights
from step_times.hosts import with_microbatches, with_recipe
from step_times.rows import Row, step_of_row

Array = NDArray[np.float64]
NUM_FOLDS = 8
HELD_BACK = frozenset(
    {
        *("automodel|qwen3-30b-a3b|H100", "bridge|llama3-405b|GB200", "bridge|llama3-70b|GB300", "bridge|nemotron3.5-lightning|GB200"),
        *("bridge|qwen3-30b-a3b|GB300", "llm-foundry|mpt-350m|A100_40GB", "llm-foundry|mpt-3b|H100", "llm-foundry|mpt-70b|H100"),
        *("mlperf|llama3-405b|GB200", "mlperf|llama3-405b|GB300", "nanotron|nt-3.57b|H100", "nemo|deepseek-v3|H100"),
    }
)
SAME = 0.01
"""Two layouts whose measured times are closer than this are not ranked."""


class Errors(NamedTuple):
    """Errors |predicted / measured − 1| of some rows, and the bias."""

    rows: int
    median: float
    p90: float
    worst: float
    bias: float


class Ranking(NamedTuple):
    """Ranking quality among layouts of one model, machine and batch.

    Attributes:
        groups: Groups of at least two layouts.
        pairs: Pairs that differ by more than 1 %.
        tau: Kendall's, over all pairs.
        mean_regret: Mean excess time of the layout predicted to be the fastest over the measured fastest.
        worst_regret: The largest.
    """

    groups: int
    pairs: int
    tau: float
    mean_regret: float
    worst_regret: float


def usable(path: Path) -> tuple[list[Row], list[Row]]:
    """Rows of a file, and its anomalies, which no table counts."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    rows = [with_recipe(with_microbatches(row)) for row in rows]
    return [row for row in rows if not row["anomaly"]], [row for row in rows if row["anomaly"]]


def group_of(row: Row) -> str:
    """Rows that are never on both sides: one framework, model and device."""
    return "|".join((row["framework"], row["model"], row["device"]))


def fold_of(row: Row, num_folds: int = NUM_FOLDS) -> int:
    """The fold of a row's group, by a hash."""
    return int(hashlib.sha256(group_of(row).encode()).hexdigest(), 16) % num_folds


def is_held_back(row: Row) -> bool:
    """True if a row's group was left out while the terms and priors were chosen: an eighth of each family's groups, by a hash."""
    return group_of(row) in HELD_BACK


def cross_validated(rows: Sequence[Row], num_folds: int = NUM_FOLDS, near: Fit | None = None) -> Array:
    """Predicted over measured seconds of every row, by constants fitted without its group; every fit starts from `near`."""
    folds, found = np.array([fold_of(row, num_folds) for row in rows]), np.zeros(len(rows))
    for fold in range(num_folds):
        part = [row for row, own in zip(rows, folds, strict=True) if own == fold]
        if part:
            fitted = fit([row for row, own in zip(rows, folds, strict=True) if own != fold], near=near)
            found[folds == fold] = ratios(predict(fitted, part), part)
    return found


def ratios(seconds: Array, rows: Sequence[Row]) -> Array:
    """Predicted over measured."""
    return seconds / np.array([row["step_s"] for row in rows])


def errors(found: Array) -> Errors:
    """Errors of predicted over measured times."""
    off = np.abs(found - 1)
    return Errors(len(off), float(np.median(off)), float(np.quantile(off, 0.9)), float(off.max()), float(np.median(found) - 1))


def by(rows: Sequence[Row], found: Array, key: Callable[[Row], str]) -> dict[str, Errors]:
    """Errors of the rows of each key, in order of the keys."""
    places: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        places[key(row)].append(number)
    return {name: errors(found[numbers]) for name, numbers in sorted(places.items())}


def interval(found: Array, weights: Array | None = None) -> tuple[float, float]:
    """Measured over predicted, below which a tenth of the rows are and above which another: an 80 % interval.

    Rows that repeat one another count as in the fit, by `weights`: a configuration that ten releases measured is not ten configurations.
    """
    own = np.ones(len(found)) if weights is None else weights
    order = np.argsort(1 / found)
    below = (np.cumsum(own[order]) - own[order]) / (own.sum() - own.mean())
    low, high = np.interp([0.1, 0.9], below, 1 / found[order])
    return float(low), float(high)


def ranking(rows: Sequence[Row], found: Array) -> Ranking:
    """Order of layouts: same framework, release, model, device, dtype, devices, sequence and batch; other layouts."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[tuple(row[key] for key in _SWEEP)].append(number)
    agreed, pairs, regrets = 0, 0, []
    for numbers in groups.values():
        if len({_layout(rows[number]) for number in numbers}) < 2:
            continue
        measured = {number: rows[number]["step_s"] / rows[number]["gbs"] for number in numbers}
        guessed = {number: measured[number] * found[number] for number in numbers}
        own = [pair for pair in combinations(numbers, 2) if abs(measured[pair[0]] / measured[pair[1]] - 1) > SAME]
        if not own:
            continue
        agreed += sum(1 if (measured[a] < measured[b]) == (guessed[a] < guessed[b]) else -1 for a, b in own)
        pairs += len(own)
        regrets.append(measured[min(guessed, key=guessed.__getitem__)] / min(measured.values()) - 1)
    return Ranking(len(regrets), pairs, agreed / max(pairs, 1), float(np.mean(regrets or [0])), max(regrets, default=0.0))


_SWEEP = ("framework", "release", "model", "device", "precision", "gpus", "seq", "task")
_LAYOUT = ("mbs", "gbs", "tp", "pp", "cp", "vp", "ep", "etp", "dp", "tp_overlap", "dispatcher", "a2a_overlap", "compiled", "schedule")


def _layout(row: Row) -> str:
    return json.dumps([row[key] for key in _LAYOUT] + [row["recompute"], row["fsdp"], row["cuda_graph"]], sort_keys=True)


def repeats(rows: Iterable[Row], *, across_releases: bool) -> Array:
    """Differences of two measurements of one configuration, the noise floor: |a / b − 1| of every such pair."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        known = [
            row[key] for key in ("framework", "model", "device", "precision", "gpus", "seq", "gbs", "task", "fp8_attention", "tokendrop")
        ]
        release = None if across_releases else row["release"]
        groups[json.dumps([known, release, _layout(row)])].append(row["step_s"])
    return np.array([abs(a / b - 1) for times in groups.values() for a, b in combinations(sorted(times), 2)] or [0.0])


def null_models(rows: Sequence[Row]) -> dict[str, Array]:
    """Predicted over measured of models without any term: 6·N·D at 40 % of peak, and one utilisation a device and dtype."""
    from megaplan.cost.model import model_costs  # noqa: PLC0415
    from megaplan.cost.step.predict import peak_of  # noqa: PLC0415

    works = [step_of_row(row) for row in rows]
    ideal = np.array(
        [
            model_costs(work.spec, work.inventory).model_flops
            * work.step_tokens
            / work.mesh.world
            / peak_of(work.machine, work.software.dtype)
            for work in works
        ]
    )
    share = ratios(ideal, rows)
    folds, keys = np.array([fold_of(row) for row in rows]), np.array([row["device"] + row["precision"] for row in rows])
    fitted = np.zeros(len(rows))
    for number in range(len(rows)):
        others = (keys == keys[number]) & (folds != folds[number])
        fitted[number] = np.median(share[others if others.any() else folds != folds[number]])
    return {"model FLOPs at 40 % of the peak": share / 0.4, "one utilisation a device and dtype": share / fitted}


def uncalibrated(rows: Sequence[Row], near: Fit | None = None) -> Array:
    """Predicted over measured by constants fitted without the row's device, or without its framework, whichever is farther off.

    What a device or a framework that no row has will get: the constants of its kind stay at their priors. Every fit starts from `near`.
    """
    found = np.ones(len(rows))
    for key in ("device", "framework"):
        for name in sorted({row[key] for row in rows}):
            others, numbers = [row for row in rows if row[key] != name], [n for n, row in enumerate(rows) if row[key] == name]
            part = [rows[number] for number in numbers]
            ratio = ratios(predict(fit(others, near=near), part), part)
            further = np.abs(np.log(ratio)) > np.abs(np.log(found[numbers]))
            found[numbers] = np.where(further, ratio, found[numbers])
    return found


def tuples_of(rows: Sequence[Row]) -> list[FittedTuple]:
    """The combination of each row."""
    return [tuple_of(step_of_row(row)) for row in rows]


def without_tuple(rows: Sequence[Row], fitted: Fit) -> Array:
    """Predicted over measured by constants without any row of the row's combination (`FittedTuple`)."""
    tuples = tuples_of(rows)
    groups = [[number for number, own in enumerate(tuples) if own == name] for name in sorted(set(tuples))]
    return ratios(left_out(fitted, rows, groups), rows)


class Interval(NamedTuple):
    """The middle 80 % of a class of rows: measured over predicted.

    Attributes:
        low: Lower end.
        high: Upper end.
        rows: Rows of the class.
        combinations: Combinations of these rows.
        covered: Share of the rows inside the interval that the rows of other combinations give.
        borrowed: Class whose rows give the interval, because this one has few; empty for its own.
    """

    low: float
    high: float
    rows: int
    combinations: int
    covered: float
    borrowed: str = ""


class Residual(NamedTuple):
    """A row in a class: predicted over measured time, its weight, and its combination."""

    ratio: float
    weight: float
    combination: FittedTuple


FEW_ROWS = 30
"""A class with fewer rows takes the interval of its family's `near` rows, which are predicted with less knowledge."""


def class_intervals(rows: Sequence[Row], blind: Array, alone: Array, foreign: Array) -> dict[str, Interval]:
    """The intervals of `fitted.interval_class`, by class of step.

    Rows of a class of fitted combinations are those whose combination other folds have, by `blind`. Rows outside are those without their
    combination, by `alone`: near ones, whose device and dtype and whose framework other rows have, and far ones, to which the rows without
    their device or framework belong too, by `foreign`.

    Args:
        rows: The rows.
        blind: Cross-validated ratios of predicted to measured time.
        alone: Ratios by `without_tuple`.
        foreign: Ratios by `uncalibrated`.
    """
    tuples, folds = tuples_of(rows), [fold_of(row) for row in rows]
    known = {fold: {own for own, other in zip(tuples, folds, strict=True) if other != fold} for fold in set(folds)}
    fitted, weights = frozenset(tuples), row_weights(rows)
    parts: dict[str, list[Residual]] = defaultdict(list)
    for number, own in enumerate(tuples):
        if own in known[folds[number]]:
            parts[own.family].append(Residual(blind[number], weights[number], own))
        near = is_near(own, fitted - {own})
        parts[f"{NEAR if near else FAR} {own.family}"].append(Residual(alone[number], weights[number], own))
        if near:
            parts[f"{FAR} {own.family}"].append(Residual(foreign[number], weights[number], own))
    return {name: _class_interval(name, parts) for name in sorted(parts)}


def _class_interval(name: str, parts: dict[str, list[Residual]]) -> Interval:
    own = parts[name]
    lender = f"{NEAR} {name}"
    borrowed = lender if len(own) < FEW_ROWS and lender in parts else ""
    known = parts[borrowed or name]
    combinations = {each.combination for each in own}
    inside = []
    for combination in combinations:
        low, high = _middle([each for each in known if each.combination != combination])
        inside += [low <= 1 / each.ratio <= high for each in own if each.combination == combination]
    return Interval(*_middle(known), len(own), len(combinations), float(np.mean(inside)), borrowed)


def _middle(found: Sequence[Residual]) -> tuple[float, float]:
    return interval(np.array([each.ratio for each in found]), np.array([each.weight for each in found]))


def replayed(rows: Sequence[Row]) -> Array:
    """Predicted over measured by megarun's model, which has no fitted constant, of bf16 rows that train every weight without recompute.

    None of them ran megarun. The ratios say how far steps that people reach are from those of the data sheets' rates.
    """
    from megaplan.cost.replay import ReplayTimer  # noqa: PLC0415
    from megaplan.cost.step.workload import Recomputed  # noqa: PLC0415
    from megaplan.inventory.build import build_inventory  # noqa: PLC0415
    from step_times.rows import recomputed_of  # noqa: PLC0415
    from step_times.specs import is_guessed, spans, spec_of  # noqa: PLC0415

    found = []
    for row in rows:
        said = spec_of(row)
        if said.lora is not None or row["precision"] != "bf16" or recomputed_of(row) != Recomputed() or is_guessed(row):
            continue
        adam = said.optimizer.model_copy(update={"matrix": "adamw"})
        spec = said.model_copy(update={"host": type(said.host)(name="megarun", kernels="triton"), "optimizer": adam})
        found.append(ReplayTimer(build_inventory(spec), spec).step_ns(spec, spans(spec)) / 1e9 / row["step_s"])
    return np.array(found)
